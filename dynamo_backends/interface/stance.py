"""Tells what the calling thread allows: `run()` compiles nothing, `disable()` runs in eager."""

import threading


class _Thread(threading.local):
    def __init__(self) -> None:
        self.quiescent = 0  # `run()` blocks that the thread is in
        self.disabled = 0


thread = _Thread()


def stance() -> str | None:
    """Returns Dynamo's name for the thread's stance; None for the default."""
    if thread.disabled:
        return "force_eager"
    return "eager_on_recompile" if thread.quiescent else None


def compiles_nothing() -> bool:
    """Returns whether the calling thread is under `run()` or `disable()`."""
    return stance() is not None

"""Knows whether `run()` or `disable()` is active in the calling thread."""

import threading


class _Thread(threading.local):
    def __init__(self) -> None:
        self.quiescent = 0  # `run()` blocks that the thread is in
        self.disabled = 0


thread = _Thread()


def current_stance() -> str | None:
    """Returns this thread's `torch.compiler.set_stance` name; None for the default."""
    if thread.disabled:
        return "force_eager"
    return "eager_on_recompile" if thread.quiescent else None


def compiles_nothing() -> bool:
    """Returns whether `run()` or `disable()` forbids compilation in this thread."""
    return current_stance() is not None

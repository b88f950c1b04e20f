"""Where the seconds of a compilation went: each stage's own, without those inside of it."""

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar

CAPTURE = "capture"
AOT = "AOT Autograd"
NORMAL_FORM = "normal form"
PASSES = "passes"
PLAN = "plan"
TRIALS = "trials"
LOWERING = "lowering"
LOADING = "loading from disk"
RACES = "races"
VENDOR = "vendor's compiler"
VERIFICATION = "verification"

STAGES = (
    CAPTURE, AOT, NORMAL_FORM, PASSES, PLAN, TRIALS, LOWERING, LOADING, RACES, VENDOR, VERIFICATION,
)  # fmt: skip
"""In the order of the data's way."""


class StageClock:
    """Adds up the seconds of stages; those inside of another one count for themselves alone.

    Attributes:
        seconds: By name of the stage.
    """

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        self.seconds: dict[str, float] = {} if seconds is None else seconds
        self._inner = [0.0]  # seconds of what ended inside of each stage that is under way

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """What happens inside the block belongs to a stage."""
        start = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self.add(name, elapsed - self._inner.pop())
            self._inner[-1] += elapsed

    def add(self, name: str, seconds: float) -> None:
        """Counts what was measured elsewhere."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


_running: ContextVar[StageClock | None] = ContextVar("stage clock", default=None)


@contextlib.contextmanager
def clocked(clock: StageClock) -> Iterator[StageClock]:
    """Stages inside the block count for a clock, unless one runs already, which goes on."""
    running = _running.get()
    if running is not None:
        yield running
        return
    token = _running.set(clock)
    try:
        yield clock
    finally:
        _running.reset(token)


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """What happens inside the block belongs to a stage of the compilation that is under way.

    Args:
        name: One of `STAGES`.
    """
    clock = _running.get()
    if clock is None:
        yield
        return
    with clock.stage(name):
        yield


def in_words(seconds: dict[str, float]) -> str:
    """Stages in order, with their seconds; those of less than five milliseconds are left out."""
    known = [name for name in STAGES if seconds.get(name, 0.0) >= 0.005]
    return ", ".join(f"{name} {seconds[name]:.2f}" for name in known)

"""Counts compilations and eager calls of this process, and times compilation stages."""

import contextlib
import time
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from dynamo_backends._torch_private.forks import fork_safe_lock

_lock = fork_safe_lock()


class CounterBase:
    """Base class of dataclasses of numeric counters, thread-safe to increase."""

    def add(self, **more: float) -> None:
        """Increases counters by the given amounts; thread-safe."""
        with _lock:
            for name, value in more.items():
                setattr(self, name, getattr(self, name) + value)

    def as_dict(self, prefix: str = "") -> dict[str, float]:
        """Returns all counters as a dict, with a prefix before each name."""
        return {prefix + name: value for name, value in vars(self).items()}


@dataclass
class Counters(CounterBase):
    """The counters of a process: compilations, calls in eager, comparisons.

    Attributes:
        compilations: Graphs that were compiled or loaded, each time for concrete sizes or for all
            that its symbols allow, and whole steps.
        compile_seconds: Time that took, as `GraphReport.compile_seconds`.
        executables: Blocks and steps that were compiled or loaded for them.
        cache_hits: How many of these came from disk.
        eager_calls: Calls of graphs that ran in eager because nothing was compiled of them, or not
            yet.
        uncompiled: Graphs that could not be compiled and run in eager.
        uncaptured: Functions and models that were compiled, of which no operator is in a graph: all
            of their first call ran in eager.
        failed: Blocks, graphs and steps that raised when they were called, and run in eager since.
        wrong: Blocks and steps whose results differed from eager's, and that run in eager since.
        slower: Blocks and graphs that were slower than eager, and run in eager since.
        compared: Comparisons of blocks and steps with eager.
        rebinds: How often frozen weights were prepared again because they had changed.
    """

    compilations: int = 0
    compile_seconds: float = 0.0
    executables: int = 0
    cache_hits: int = 0
    eager_calls: int = 0
    uncompiled: int = 0
    uncaptured: int = 0
    failed: int = 0
    wrong: int = 0
    slower: int = 0
    compared: int = 0
    rebinds: int = 0


total = Counters()

_kept: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def track_executable(executable: Any) -> None:
    """Counts an executable as live until it is garbage-collected."""
    _kept[id(executable)] = executable


def count_live_executables() -> int:
    """Returns the number of executables that are alive in this process."""
    return len(_kept)


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
    """Sums seconds by compilation stage; nested stages are subtracted from outer ones.

    Attributes:
        seconds: By name of the stage.
    """

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        self.seconds: dict[str, float] = {} if seconds is None else seconds
        self._inner = [0.0]  # seconds of what ended inside of each stage that is under way

    @contextlib.contextmanager
    def time_stage(self, name: str) -> Iterator[None]:
        """Adds the block's time to a stage (context manager)."""
        start = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self.add(name, elapsed - self._inner.pop())
            self._inner[-1] += elapsed

    def add(self, name: str, seconds: float) -> None:
        """Adds seconds that were measured elsewhere to a stage."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


_running: ContextVar[StageClock | None] = ContextVar("stage clock", default=None)


@contextlib.contextmanager
def use_stage_clock(clock: StageClock) -> Iterator[StageClock]:
    """Makes a clock receive stage times unless one is active (context manager)."""
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
def time_stage(name: str) -> Iterator[None]:
    """Adds the block's time to a stage of the active clock (context manager).

    Args:
        name: One of `STAGES`.
    """
    clock = _running.get()
    if clock is None:
        yield
        return
    with clock.time_stage(name):
        yield


def format_stage_seconds(seconds: dict[str, float]) -> str:
    """Formats stage times as text, such as "plan 0.12"; omits those below 5 ms."""
    known = [name for name in STAGES if seconds.get(name, 0.0) >= 0.005]
    return ", ".join(f"{name} {seconds[name]:.2f}" for name in known)

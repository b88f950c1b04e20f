"""What this process has compiled and run, counted."""

import weakref
from dataclasses import dataclass
from typing import Any

from dynamo_backends._torch_private.forks import fork_safe_lock

_lock = fork_safe_lock()


class Counted:
    """Counts of a process, which only grow; a base of dataclasses of numbers."""

    def add(self, **more: float) -> None:
        """Adds to counts, from any thread."""
        with _lock:
            for name, value in more.items():
                setattr(self, name, getattr(self, name) + value)

    def named(self, prefix: str = "") -> dict[str, float]:
        """Returns all counts, by names with a prefix."""
        return {prefix + name: value for name, value in vars(self).items()}


@dataclass
class Counters(Counted):
    """What a process compiled and ran.

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
    compared: int = 0
    rebinds: int = 0


total = Counters()

_kept: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def keep_count_of(executable: Any) -> None:
    """Counts an executable for as long as it is kept."""
    _kept[id(executable)] = executable


def kept() -> int:
    """Returns how many executables are kept in memory."""
    return len(_kept)

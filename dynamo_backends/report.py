"""What became of every captured graph: counted, explained, and handed to whoever records it."""

import contextlib
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

log = logging.getLogger("dynamo_backends")

Kind = Literal["inference", "forward", "backward"]


@dataclass(frozen=True)
class Fallback:
    """Operators of one overload that run in eager for one reason.

    Attributes:
        op: The overload, such as "aten.nonzero.default".
        reason: Why the backend does not run it.
        count: How many calls of it the graph has.
        source: The user's line that made the first of them, "file:line, code", if known.
        by_design: Running it in eager is what the pipeline wants (random numbers are torch's).
    """

    op: str
    reason: str
    count: int
    source: str | None = None
    by_design: bool = False


@dataclass
class GraphReport:
    """What became of one captured graph.

    Attributes:
        backend: Name of the backend.
        kind: What AOT Autograd made it for.
        ops_on_backend: ATen calls that the backend runs.
        ops_in_eager: ATen calls left to eager.
        fallbacks: The latter, grouped, with reasons.
        blocks: Number of parts handed to the backend.
        compile_seconds: Time spent in this package and the vendor's compiler, without Dynamo and
            AOT Autograd.
        executables: How many were made or loaded (one per block and concrete shape).
        cache_hits: How many of them came from disk.
        rebinds: How often frozen weights had to be prepared again because they changed.
        runtime_fallbacks: Reasons why compiled code was replaced by eager after it was compiled.
        executable: The compiled graph itself.
    """

    backend: str
    kind: Kind
    ops_on_backend: int = 0
    ops_in_eager: int = 0
    fallbacks: tuple[Fallback, ...] = ()
    blocks: int = 0
    compile_seconds: float = 0.0
    executables: int = 0
    cache_hits: int = 0
    rebinds: int = 0
    runtime_fallbacks: list[str] = field(default_factory=list)
    executable: Any = field(default=None, repr=False)

    def log_fallbacks(self) -> None:
        """Writes one line if anything fell back: never silently slow."""
        if any(not f.by_design for f in self.fallbacks):
            total = self.ops_on_backend + self.ops_in_eager
            reasons = "; ".join(f"{f.count}x {f.op}: {f.reason}" for f in self.fallbacks[:5])
            more = f"; and {len(self.fallbacks) - 5} more" if len(self.fallbacks) > 5 else ""
            log.warning(
                "%s: %d of %d operators of one %s graph run in eager (%s%s)",
                self.backend,
                self.ops_in_eager,
                total,
                self.kind,
                reasons,
                more,
            )


_recorders: list[list[GraphReport]] = []
_lock = threading.Lock()


@contextlib.contextmanager
def record() -> Iterator[list[GraphReport]]:
    """Collects a report of each graph that is compiled inside the block, in any thread.

    Example:
        >>> with record() as reports:
        ...     compiled(x)
        >>> reports[0].ops_in_eager
        0
    """
    reports: list[GraphReport] = []
    with _lock:
        _recorders.append(reports)
    try:
        yield reports
    finally:
        with _lock:
            _recorders[:] = [r for r in _recorders if r is not reports]


def publish(report: GraphReport) -> None:
    """Hands a report to every active `record()`."""
    with _lock:
        for reports in _recorders:
            reports.append(report)

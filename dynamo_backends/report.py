"""What became of every captured graph: counted, explained, and handed to whoever records it."""

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
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


@dataclass(frozen=True)
class InputReport:
    """One input of a functional graph.

    Attributes:
        name: As in the user's code where that is known: "x", "self.fc.weight".
        role: Its `graph.Role`, such as "parameter".
        value: Data type and shape, such as "float32[3, s0]"; for a symbol its expression.
        frozen: The backend prepares its value once.
        reason: Why a weight is not frozen; empty if it is, and for inputs that are no weights.
        mutated: The graph updates it in place.
        mutated_at: The user's lines that do, "file:line, code", where known.
        shares_memory_with: Names of other inputs of the captured graph with memory in common.
    """

    name: str
    role: str
    value: str
    frozen: bool = False
    reason: str = ""
    mutated: bool = False
    mutated_at: tuple[str, ...] = ()
    shares_memory_with: tuple[str, ...] = ()


@dataclass(frozen=True)
class PartReport:
    """One part of a partitioned graph, in the order in which they run.

    Attributes:
        runs_on: Name of the backend, or "eager".
        ops: Number of ATen calls.
        operators: How often it calls each overload.
    """

    runs_on: str
    ops: int
    operators: Mapping[str, int]


@dataclass(frozen=True)
class Compilation:
    """One compilation of a graph for concrete shapes.

    Attributes:
        shapes: Data types and shapes of the inputs that differ from call to call, without what
            a backward graph gets from its forward graph: "x: float32[3, 4]".
        executables: How many were made or loaded for it.
        cache_hits: How many of these came from disk.
        seconds: As `GraphReport.compile_seconds`.
    """

    shapes: tuple[str, ...]
    executables: int
    cache_hits: int
    seconds: float


@dataclass
class GraphReport:
    """What became of one captured graph.

    Attributes:
        backend: Name of the backend.
        kind: What AOT Autograd made it for.
        capture: Number of the graph that Dynamo captured; the forward and the backward graph of
            one capture have the same.
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
        inputs: The inputs, with roles, mutations and aliases.
        output_aliases: Which outputs share memory with inputs or other outputs, in words.
        parts: The parts of the graph (of the last compilation, if there were several).
        compilations: One entry for each set of concrete shapes.
        reverted: Why the graph was not compiled in the blocks that the backend could take, and
            what runs it instead; empty if it was.
        ops_on_inductor: ATen calls that Inductor runs, if the graph was reverted to it.
        executable: The compiled graph itself.
    """

    backend: str
    kind: Kind
    capture: int = 0
    ops_on_backend: int = 0
    ops_in_eager: int = 0
    fallbacks: tuple[Fallback, ...] = ()
    blocks: int = 0
    compile_seconds: float = 0.0
    executables: int = 0
    cache_hits: int = 0
    rebinds: int = 0
    runtime_fallbacks: list[str] = field(default_factory=list)
    inputs: tuple[InputReport, ...] = field(default=(), repr=False)
    output_aliases: tuple[str, ...] = ()
    parts: tuple[PartReport, ...] = field(default=(), repr=False)
    compilations: list[Compilation] = field(default_factory=list, repr=False)
    reverted: str = ""
    ops_on_inductor: int = 0
    executable: Any = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Everything except the executable, in types that JSON has."""
        names = [f.name for f in fields(self) if f.name != "executable"]
        return {name: plain(getattr(self, name)) for name in names}

    def log_fallbacks(self) -> None:
        """Says, in a line each, if the graph was reverted or anything fell back."""
        if self.reverted:
            log.warning("%s: one %s graph was reverted: %s", self.backend, self.kind, self.reverted)
        if any(not f.by_design for f in self.fallbacks):
            total = self.ops_on_backend + self.ops_in_eager + self.ops_on_inductor
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


def plain(value: Any) -> Any:
    """Dataclasses, mappings and sequences as dicts and lists, as JSON has them."""
    if isinstance(value, GraphReport):
        return value.to_dict()
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


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

"""Defines reports of captured graphs, and collects them with `record()`."""

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

from dynamo_backends._torch_private import compile_id
from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.interface.counters import VERIFICATION, StageClock, total
from dynamo_backends.interface.mesh import MeshReport
from dynamo_backends.interface.notebooks import candidates_html, fields_html

log = logging.getLogger("dynamo_backends")

Kind = Literal["inference", "forward", "backward", "step"]
Region = Literal["block", "graph", "step"]

_NOT_SHOWN = ("backend", "kind", "capture", "candidates", "executable")  # of a report's fields


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
    """One part of a partitioned graph: where it runs and its operators.

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
    """One compilation of a graph, for concrete shapes or a dynamic range.

    Attributes:
        shapes: Data types and shapes of the inputs that differ from call to call, without what
            a backward graph gets from its forward graph: "x: float32[3, 4]", or "x: float32[s0, 4]"
            where it serves all sizes.
        executables: How many were made or loaded for it.
        cache_hits: How many of these came from disk.
        seconds: As `GraphReport.compile_seconds`.
    """

    shapes: tuple[str, ...]
    executables: int
    cache_hits: int
    seconds: float


@dataclass
class ServedCalls:
    """The number of calls of a dynamic graph that one program, or eager, ran.

    Attributes:
        by: "ranged": a program for all sizes that the symbols allow; "padded": one for sizes up to
            its bounds; "exact": one for concrete sizes; "eager while compiling"; "eager".
        shapes: As `Compilation.shapes`; empty in eager.
        calls: How many.
        executables: As `Compilation.executables`; 0 in eager.
        seconds: Seconds of compilation.
    """

    by: Literal["ranged", "padded", "exact", "eager while compiling", "eager"]
    shapes: tuple[str, ...]
    calls: int = 0
    executables: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class CandidateReport:
    """One candidate of autotune for one graph.

    Attributes:
        name: Name of the backend; "@bf16" after it says that it computes in bfloat16.
        reason: Why it was not chosen; empty for the one that was.
        compile_s: Seconds of compilation and the first call; None if it could not be compiled.
        error: Root mean square error against float64, relative to the size of the output that is
            worst, also of one that is wrong; None if it was not compared.
        seconds: Median of a call, had it run in the same rounds as eager; None if not measured.
        speedup: Median time of eager over its own, with the 95% confidence interval; None if it was
            not measured, or gave up while it was.
        memory: Bytes by which the process grew; None unless memory is the objective.
        graph: What was tuned, if it is more than the report's graph: "training" is the forward
            and backward graph of one capture together.
        verify_s: Seconds of proving it right, after the first call; None if that did not begin.
        race_s: Seconds in which it was measured, pauses included; None if it was not.
        rounds: Seconds of a call in each round of the race until it left that; the others' rounds
            at the same places were at the same time. Only one, of the warm-up, if it was hopeless.
        measured: Of one in int8: by name, what the measures of the option `tolerance` came to on
            held-out batches.
    """

    name: str
    reason: str = ""
    compile_s: float | None = None
    error: float | None = None
    seconds: float | None = None
    speedup: tuple[float, float, float] | None = None
    memory: int | None = None
    graph: str = ""
    verify_s: float | None = None
    race_s: float | None = None
    rounds: tuple[float, ...] = ()
    measured: Mapping[str, float] = field(default_factory=dict)

    @property
    def chosen(self) -> bool:
        """Whether autotune chose this candidate for the graph."""
        return not self.reason

    @property
    def is_faster(self) -> bool:
        """Whether it was correct and its speedup's 95% interval is above 1."""
        return self.speedup is not None and self.speedup[1] > 1

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> "CandidateReport":
        """Parses a report from a JSON dict; raises ValueError if it is none.

        Raises:
            ValueError: It is not the dict of a candidate.
        """
        names = {f.name for f in fields(cls)}
        if not isinstance(given, Mapping) or "name" not in given or not names.issuperset(given):
            raise ValueError("it lists an entry that is not a candidate")
        values = dict(given)
        if values.get("speedup") is not None:
            values["speedup"] = tuple(map(float, values["speedup"]))
        values["rounds"] = tuple(map(float, values.get("rounds", ())))
        measured = dict(values.get("measured", {}))
        values["measured"] = {str(name): float(number) for name, number in measured.items()}
        return cls(**values)


@dataclass(frozen=True)
class EagerEvent:
    """Compiled code that eager replaced at run time, and why.

    Attributes:
        kind: "failed": it raised; "wrong": its results differ from eager's.
        region: What runs in eager.
        reason: What it raised, or what is wrong, in words.
    """

    kind: Literal["failed", "wrong"]
    region: Region
    reason: str


@dataclass(frozen=True)
class SpeedReport:
    """Times of compiled code compared with eager (see `Options.slow`).

    Attributes:
        region: What was measured: a block, or all blocks and eager parts of a graph together.
        part: Its operators, in words.
        outcome: "slower" than eager, beyond doubt; "fast enough": it is not, or hardly; "not sure";
            "not measured".
        own_s: Best time of compiled code, in seconds.
        eager_s: Best time of eager.
        reason: Why nothing more is known, or from where it is.
        replaced: Eager runs it from now on.
    """

    region: Region
    part: str
    outcome: Literal["slower", "fast enough", "not sure", "not measured"]
    own_s: float = 0.0
    eager_s: float = 0.0
    reason: str = ""
    replaced: bool = False

    @property
    def slowdown(self) -> float:
        """The ratio of compiled to eager time; 0 if unknown."""
        return self.own_s / self.eager_s if self.eager_s else 0.0

    @property
    def describe_times(self) -> str:
        """Both times as text, such as "1.5 times eager's time (3 ms, eager 2 ms)"."""
        own, eager = self.own_s * 1e3, self.eager_s * 1e3
        factor = f"{self.slowdown:.0f}" if self.slowdown >= 10 else f"{self.slowdown:.2g}"
        return f"{factor} times eager's time ({own:.3g} ms, eager {eager:.3g} ms)"

    def __str__(self) -> str:
        """In words."""
        said = f"a {self.region} ({self.part}): {self.outcome}"
        said += f", {self.describe_times}" if self.slowdown else ""
        said += f", {self.reason}" if self.reason else ""
        return said + ("; it runs in eager" if self.replaced else "")


_OF_A_PROGRAM = (
    *("ops_on_backend", "ops_in_eager", "ops_on_inductor"),
    *("fallbacks", "blocks", "parts", "reverted", "tuned"),
)


@dataclass
class GraphReport:
    """The report of one captured graph: what runs where and why, compilations, fallbacks.

    Attributes:
        backend: Name of the backend.
        kind: What AOT Autograd made it for.
        capture: Number of the graph that Dynamo captured; the forward and the backward graph of
            one capture have the same.
        compile_id: What Dynamo calls the compilation, such as "0/1"; empty for steps, which it does
            not see.
        ops_on_backend: ATen calls that the backend runs.
        ops_in_eager: ATen calls left to eager.
        fallbacks: The latter, grouped, with reasons.
        blocks: Number of parts handed to the backend.
        compile_seconds: Time spent in this package and the vendor's compiler, without Dynamo and
            AOT Autograd.
        executables: How many were made or loaded: one per block, and per set of concrete shapes
            where none serves all sizes.
        cache_hits: How many of them came from disk.
        rebinds: How often frozen weights had to be prepared again because they changed.
        cuda_graphs: How many CUDA graphs were recorded of its blocks (see `CudaGraphOptions`).
        tuned: How many fused functions have a schedule that tuning has found (see `TvmOptions`).
        uncaptured: Reasons why blocks run without a CUDA graph although one was asked for.
        events: What was replaced by eager after it was compiled, and why.
        paces: What is known of the times of its blocks beside eager's, once it is known.
        verified: How many blocks or steps were compared with eager (see `Options.verify`).
        verify_seconds: Time that took, without the compiled code itself.
        stage_seconds: Where the time of its compilations and first calls went, by stage (see
            `stages.STAGES`), each without the others. Those of Dynamo and AOT Autograd are noted
            with the first graph of a capture.
        unverified: Reasons why some could not be compared.
        inputs: The inputs, with roles, mutations and aliases.
        output_aliases: Which outputs share memory with inputs or other outputs, in words.
        parts: The parts of the graph (of the last compilation, if there were several).
        compilations: One entry for each set of concrete shapes.
        failures: What failed and was done without: reading or writing the disk cache, parts of
            this report. Results do not depend on it.
        reverted: Why the graph was not compiled in the blocks that the backend could take, and
            what runs it instead; empty if it was.
        exact: With dynamic shapes and a backend that pads inputs: why every set of concrete shapes
            is compiled for itself; empty if not.
        ops_on_inductor: ATen calls that Inductor runs, if the graph was reverted to it.
        candidates: With autotune: every candidate and what became of it.
        chosen: With autotune: the candidate that runs the graph; empty without.
        tuning: With autotune's `mode="background"`: where tuning stands, in words.
        tuning_seconds: With autotune: where the time of tuning went that is no candidate's:
            "capture" (Dynamo, until the graph was handed over) and "reference" (eager's results,
            also in float64).
        symbols: Of a graph with symbolic sizes, each with the range that its guards allow, such as
            "2 to 64".
        served: What served its calls, in a copy that `explain` makes; `traffic()` says what has
            until now.
        precision: The option `precision` of a graph in int8; else empty.
        tolerance: Of a graph in int8: what the user admits, in words; with autotune also of the
            candidates.
        measured: For a graph in int8: as `CandidateReport.measured`.
        in_float: Of a graph in int8: the part of each block's products, from the first one on, that
            stayed in float32 because results were not accurate enough otherwise.
        mesh: Of what is spread over several devices: where everything is.
        executable: The compiled graph itself.
    """

    backend: str
    kind: Kind
    capture: int = 0
    compile_id: str = field(default_factory=compile_id)
    ops_on_backend: int = 0
    ops_in_eager: int = 0
    fallbacks: tuple[Fallback, ...] = ()
    blocks: int = 0
    compile_seconds: float = 0.0
    executables: int = 0
    cache_hits: int = 0
    rebinds: int = 0
    cuda_graphs: int = 0
    tuned: int = 0
    uncaptured: list[str] = field(default_factory=list)
    events: list[EagerEvent] = field(default_factory=list)
    paces: list[SpeedReport] = field(default_factory=list)
    verified: int = 0
    verify_seconds: float = 0.0
    stage_seconds: dict[str, float] = field(default_factory=dict, repr=False)
    unverified: list[str] = field(default_factory=list)
    inputs: tuple[InputReport, ...] = field(default=(), repr=False)
    output_aliases: tuple[str, ...] = ()
    parts: tuple[PartReport, ...] = field(default=(), repr=False)
    compilations: list[Compilation] = field(default_factory=list, repr=False)
    failures: list[str] = field(default_factory=list)
    reverted: str = ""
    exact: str = ""
    ops_on_inductor: int = 0
    candidates: tuple[CandidateReport, ...] = field(default=(), repr=False)
    chosen: str = ""
    tuning: str = ""
    tuning_seconds: Mapping[str, float] = field(default_factory=dict)
    symbols: Mapping[str, str] = field(default_factory=dict)
    served: tuple[ServedCalls, ...] = ()
    precision: str = ""
    tolerance: str = ""
    measured: Mapping[str, float] = field(default_factory=dict)
    in_float: float = 0.0
    mesh: MeshReport | None = None
    executable: Any = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields except the executable as JSON types."""
        names = [f.name for f in fields(self) if f.name != "executable"]
        values = {
            name: to_json_types(getattr(self, name)) for name in (*names, "runtime_fallbacks")
        }
        return {**values, "served": to_json_types(self.traffic())}

    def _repr_html_(self) -> str:
        """Returns it for Jupyter: what is not empty, and the candidates."""
        shown = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NOT_SHOWN}
        title = f"{self.backend}: {self.kind} graph {self.capture}"
        return fields_html(title, shown) + candidates_html(self.candidates)

    def traffic(self) -> tuple[ServedCalls, ...]:
        """Returns how many calls each program of a dynamic graph served; empty if static."""
        served: tuple[ServedCalls, ...] = getattr(self.executable, "served", self.served)
        return served

    def copy_description(self, other: "GraphReport") -> None:
        """Copies the partition fields from the report whose program runs this graph."""
        for name in _OF_A_PROGRAM:
            setattr(self, name, getattr(other, name))

    @property
    def runtime_fallbacks(self) -> list[str]:
        """The reasons of `events`, as text."""
        return [event.reason for event in self.events]

    @property
    def title(self) -> str:
        """The kind and number of the graph, as "the forward graph of capture 2"."""
        return f"the {self.kind} graph" + (f" of capture {self.capture}" if self.capture else "")

    def note_comparison(self, seconds: float, unverified: str) -> None:
        """Records a comparison with eager, or why it was impossible.

        Args:
            seconds: What that took.
            unverified: Why it could not; empty: it could.
        """
        self.verify_seconds += seconds
        StageClock(self.stage_seconds).add(VERIFICATION, seconds)
        total.add(compared=not unverified)
        if not unverified:
            self.verified += 1
        elif unverified not in self.unverified:
            self.unverified.append(unverified)

    def note_compilation(self, made: Compilation) -> None:
        """Records, counts and logs a compilation of the graph.

        Args:
            made: What came of it.
        """
        self.compile_seconds += made.seconds
        self.compilations.append(made)
        total.add(
            compilations=1,
            compile_seconds=made.seconds,
            executables=made.executables,
            cache_hits=made.cache_hits,
        )
        log.info(
            "%s: %s was compiled in %.2f s (%s); %d of %d executables were loaded from the disk "
            "cache",
            self.backend, self.title, made.seconds, ", ".join(made.shapes) or "no inputs",
            made.cache_hits, made.executables,
        )  # fmt: skip

    def note_failure(self, text: str) -> None:
        """Records a handled failure; logs a warning except in trial compilations.

        Args:
            text: What, and why.
        """
        self.failures.append(text)
        if not is_trial_thread():
            log.warning("%s: %s", self.backend, text)

    def log_fallbacks(self) -> None:
        """Logs why a graph was reverted, and which operators run in eager.

        Nothing is said of graphs that are compiled on trial (see `isolate_trial_reports`).
        """
        if is_trial_thread():
            return
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


def to_json_types(value: Any) -> Any:
    """Converts dataclasses, mappings and sequences to JSON dicts and lists."""
    if isinstance(value, GraphReport):
        return value.to_dict()
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json_types(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: to_json_types(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_types(v) for v in value]
    return value


_recorders: list[list[GraphReport]] = []
_lock = fork_safe_lock()


@contextlib.contextmanager
def record() -> Iterator[list[GraphReport]]:
    """Collects reports of graphs compiled in the block, by any thread.

    Examples:
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


class _Thread(threading.local):
    def __init__(self) -> None:
        self.apart: list[GraphReport] | None = None


_thread = _Thread()


def is_trial_thread() -> bool:
    """Returns whether this thread is in a trial compilation (see `isolate_trial_reports`)."""
    return _thread.apart is not None


@contextlib.contextmanager
def isolate_trial_reports() -> Iterator[list[GraphReport]]:
    """Hides this thread's reports from `record()`, and yields them (context manager).

    For graphs that are compiled on trial.
    """
    before, _thread.apart = _thread.apart, []
    try:
        yield _thread.apart
    finally:
        _thread.apart = before


def send_to_recorders(report: GraphReport) -> None:
    """Appends a report to the lists of all active `record()` blocks."""
    if _thread.apart is not None:
        _thread.apart.append(report)
        return
    with _lock:
        for reports in _recorders:
            reports.append(report)

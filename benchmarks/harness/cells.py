"""One cell of a large comparison: a model at a batch size, in a dtype, in inference or training.

All backends of a cell are compiled, checked against float64 and timed in the same rounds.
"""

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn

from dynamo_backends.bench.accuracy import as_precise, compare_outputs
from dynamo_backends.bench.statistics import compare
from dynamo_backends.bench.suites import Inputs, ModelCase, Scale, call, find_case
from dynamo_backends.bench.work import (
    DTYPES,
    RoundingToTf32,
    cast,
    detached,
    loss,
    tolerance,
    without_dropout,
)
from dynamo_backends.interface.compiler import compiler
from dynamo_backends.interface.errors import brief_error
from dynamo_backends.interface.registry import list_backends
from dynamo_backends.interface.report import record

Mode = Literal["inference", "training"]

EAGER = "eager"
_SAMPLE_S = 0.01  # a sample of shorter calls consists of several
_MOST_REPEATS = 20


@dataclass(frozen=True, order=True)
class Cell:
    """What is measured.

    Attributes:
        mode: "inference", or "training": forward and backward.
        dtype: "float32" or "bf16", of weights and inputs.
        batch: Images or sequences per call.
        suite: Of the model.
        model: Its name.
    """

    mode: Mode
    dtype: str
    batch: int
    suite: str
    model: str

    def case(self, scale: Scale) -> ModelCase:
        """The model and its inputs."""
        return find_case(self.suite, self.model, scale, self.batch)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Row:
    """One backend in one cell.

    Attributes:
        backend: Its name.
        status: "ok"; "wrong"; "failed" (it raised, or the process died); for eager "ok".
        ms: Median of a call, in milliseconds.
        ratio: Eager's median over its own.
        ratio_95: The 95% confidence interval of that.
        first_call_s: Seconds of capture, compilation and the first call.
        max_rel: Largest difference from eager within one output, relative to its largest value.
        error: What is wrong.
        note: What else there is to say: what autotune chose, operators left to eager.
    """

    backend: str
    status: Literal["ok", "wrong", "failed"]
    ms: float | None = None
    ratio: float | None = None
    ratio_95: tuple[float, float] | None = None
    first_call_s: float | None = None
    max_rel: float | None = None
    error: str = ""
    note: str = ""


@dataclass(frozen=True)
class Measuring:
    """How cells are measured.

    Attributes:
        device: torch device type.
        scale: Sizes of the models.
        rounds: Samples of each backend.
        round_budget_s: No round begins later than this many seconds after the first.
        options: Of the backends.
        autocast: In inference, results may be as inexact as eager's under autocast to bfloat16,
            cast to the dtypes that they have without it.
    """

    device: str
    scale: Scale
    rounds: int
    round_budget_s: float = math.inf
    options: Mapping[str, Mapping[str, Any]] | None = None
    autocast: bool = False


Step = Callable[[], Any]


def measure_cell(
    cell: Cell,
    backends: Sequence[str],
    how: Measuring,
    on_backend: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Compiles a model with each backend, checks each, and times the right ones interleaved.

    Args:
        cell: What to measure.
        backends: Names of Dynamo backends, eager not among them.
        how: How.
        on_backend: Told before each is compiled, and "rounds" before they are timed.
    """
    torch.compiler.reset()
    # Dynamo counts each backend of a model as one more compilation of the same code.
    with torch._dynamo.config.patch(recompile_limit=64):
        return _measure_cell(cell, backends, how, on_backend)


def _measure_cell(
    cell: Cell, backends: Sequence[str], how: Measuring, on_backend: Callable[[str], None]
) -> list[Row]:
    work = _Work(cell, how)
    rows: dict[str, Row] = {}
    steps: dict[str, Step] = {EAGER: work.step(work.model)}
    for backend in backends:
        on_backend(backend)
        rows[backend], step = work.compile(backend)
        if step is not None:
            steps[backend] = step
    on_backend("rounds")
    seconds = _once(steps[EAGER], work.synchronize)
    timings = compare(
        steps,
        how.rounds,
        pause_s=0.0 if how.device == "cuda" else 0.03,  # only threads of CPUs go on spinning
        repeat=max(1, min(_MOST_REPEATS, int(_SAMPLE_S / max(seconds, 1e-7)))),
        budget_s=how.round_budget_s,
        synchronize=work.synchronize,
    )
    rows = {EAGER: Row(EAGER, "ok"), **rows}
    return [_timed(row, timings.get(row.backend)) for row in rows.values()]


def _timed(row: Row, timing: Any) -> Row:
    if timing is None:
        return row
    ratio = timing.speedup
    return Row(
        **{
            **vars(row),
            "ms": timing.median * 1e3,
            "ratio": ratio.value,
            "ratio_95": (ratio.low, ratio.high),
        }
    )


def _once(step: Step, synchronize: Callable[[], None] | None) -> float:
    """Seconds of a call that is not the first."""
    times = []
    for _ in range(4):
        start = time.perf_counter()
        step()
        if synchronize is not None:
            synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


class _Work:
    """A cell's model on its device, with what eager and float64 make of its inputs."""

    def __init__(self, cell: Cell, how: Measuring):
        self._cell, self._how = cell, how
        case, dtype = cell.case(how.scale), DTYPES[cell.dtype]
        self.model = case.make().to(how.device, dtype)
        if cell.mode == "training":
            without_dropout(self.model.train())
        self._inputs = cast(case.inputs(), how.device, dtype)
        self.synchronize = torch.cuda.synchronize if how.device == "cuda" else None
        precise = copy.deepcopy(self.model).double()
        wide = cast(self._inputs, how.device, torch.float64)
        self._precise = detached(self._run(precise, precise, wide))
        del precise
        self._expected = self._allowed = detached(self.step(self.model)())
        if how.autocast:
            with torch.autocast(how.device, dtype=torch.bfloat16):
                self._allow(self.step(self.model))
        elif how.device == "cuda":
            with RoundingToTf32():
                self._allow(self.step(self.model))

    def _allow(self, step: Step) -> None:
        """Results may be as inexact as those of a step."""
        self._allowed = as_precise(self._expected, detached(step()))

    def step(self, function: Callable[..., Any]) -> Step:
        """A call of the cell's kind without arguments; gives what is to be checked."""
        return lambda: self._run(function, self.model, self._inputs)

    def compile(self, backend: str) -> tuple[Row, Step | None]:
        """Compiles and checks; no step if it failed or is wrong."""
        options = (self._how.options or {}).get(backend)
        try:
            function = torch.compile(self.model, **_backend(backend, options or {}))
            step = self.step(function)
            start = time.perf_counter()
            with record() as reports:
                step()
                if self.synchronize is not None:
                    self.synchronize()
                seconds = time.perf_counter() - start
                for _ in range(3):  # backends that record calls do so at a later one
                    result = step()
            accuracy = compare_outputs(
                self._expected,
                detached(result),
                self._precise,
                tolerance(self._cell.dtype, self._cell.mode),
                self._allowed,
            )
        except Exception as error:  # a row of the table; the others still have their turn
            return Row(backend, "failed", error=brief_error(error)), None
        row = Row(
            backend,
            "ok" if accuracy.passed else "wrong",
            first_call_s=seconds,
            max_rel=accuracy.max_rel,
            error=accuracy.detail,
            note=_note(reports),
        )
        return row, step if accuracy.passed else None

    def _run(self, function: Callable[..., Any], model: nn.Module, inputs: Inputs) -> Any:
        if self._cell.mode == "inference":
            with torch.no_grad():
                return call(function, inputs)
        model.zero_grad(set_to_none=True)
        found = loss(call(function, inputs))
        found.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return {"loss": found, **gradients}


def _backend(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `torch.compile`; this package's backends are known without an entry point."""
    if name in list_backends():
        return {"backend": compiler(name, **options)}
    return {"backend": name, "options": dict(options) or None}


def _note(reports: Sequence[Any]) -> str:
    chosen = dict.fromkeys(r.chosen for r in reports if r.chosen)
    eager = sum(r.ops_in_eager for r in reports)
    failed = [reason for r in reports for reason in (*r.runtime_fallbacks, *r.uncaptured)]
    parts = [f"chose {', '.join(chosen)}"] if chosen else []
    parts += [f"{eager} operators in eager"] if eager else []
    return "; ".join([*parts, *failed[:1]])


def cells(
    models: Sequence[tuple[str, str]],
    batches: Sequence[int],
    dtypes: Sequence[str],
    modes: Sequence[Mode],
) -> Iterator[Cell]:
    """All combinations: inference in float32 first, and all models of one kind together.

    Args:
        models: Suite and name of each.
        batches: Batch sizes.
        dtypes: Keys of `DTYPES`.
        modes: Of `Mode`.
    """
    for mode in modes:
        for dtype in dtypes:
            for batch in batches:
                for suite_name, name in models:
                    yield Cell(mode, dtype, batch, suite_name, name)

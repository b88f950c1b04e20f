"""Compiles a model with a backend, checks it against eager and times both."""

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dynamo_backends import Fallback, GraphReport, record
from dynamo_backends import _torch_private as private
from dynamo_backends.bench.accuracy import Accuracy, check
from dynamo_backends.bench.statistics import time_candidates
from dynamo_backends.bench.suites.case import Inputs, call
from dynamo_backends.interface.errors import brief_error
from dynamo_backends.workers.statistics import Timing


@dataclass
class Compiled:
    """A compiled model, `function`, after its first call.

    Attributes:
        first_call_s: Seconds of `torch.compile` and the first call: capture, compilation, one run.
        graphs: How many graphs Dynamo captured.
        reports: What became of them; empty for a backend of another package.
    """

    function: Callable[..., Any]
    backend: str
    first_call_s: float
    graphs: int
    reports: list[GraphReport] = field(repr=False)

    @property
    def ops_on_backend(self) -> int | None:
        """ATen calls that the backend runs; None if it does not report."""
        return sum(r.ops_on_backend for r in self.reports) if self.reports else None

    @property
    def ops_in_eager(self) -> int | None:
        """ATen calls left to eager; None if the backend does not report."""
        return sum(r.ops_in_eager for r in self.reports) if self.reports else None

    @property
    def fallbacks(self) -> list[Fallback]:
        """Operators that run in eager, with reasons."""
        return [fallback for report in self.reports for fallback in report.fallbacks]


@dataclass(frozen=True)
class Result:
    """One model on one backend, with the times of eager and of the compiled model.

    What it has not is None, if the backend failed; `error` says why.
    """

    model: str
    backend: str
    eager: Timing | None = None
    timing: Timing | None = None
    accuracy: Accuracy | None = None
    compiled: Compiled | None = None
    error: str = ""

    @property
    def passed(self) -> bool:
        """Whether the backend ran the model and its results are right."""
        return self.accuracy is not None and self.accuracy.passed


def compile_model(
    model: nn.Module,
    inputs: Inputs,
    backend: str,
    *,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Compiled:
    """Compiles a model through `torch.compile` and calls it once; the inputs are not changed.

    Args:
        model: The model.
        inputs: Its arguments.
        backend: Name of a Dynamo backend.
        options: The backend's options.
        **settings: Further arguments of `torch.compile`, such as `fullgraph`.
    """
    before = _captured()
    arguments = copy.deepcopy(inputs)
    with record() as reports:  # what torch has kept of another process is loaded by `compile`
        start = time.perf_counter()
        function = torch.compile(
            model, backend=backend, options=dict(options) if options else None, **settings
        )
        call(function, arguments)
        seconds = time.perf_counter() - start
    return Compiled(function, backend, seconds, _captured() - before, reports)


def _captured() -> int:
    """Graphs that Dynamo captured in this process so far."""
    count: int = private.dynamo_counters()["stats"]["unique_graphs"]
    return count


def measure(
    model: nn.Module,
    inputs: Inputs,
    backends: Sequence[str],
    *,
    name: str = "",
    rounds: int = 20,
    budget_s: float = math.inf,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    on_step: Callable[[str], None] | None = None,
) -> list[Result]:
    """Compiles a model with each backend, checks each, and times the right ones interleaved.

    Call it under `torch.no_grad()` or `torch.inference_mode()` to measure inference. A backend that
    raises or whose results are wrong is reported and does not stop the others; it is not timed.

    Args:
        model: The model, on its device.
        inputs: Its arguments, on the same device.
        backends: Names of Dynamo backends.
        name: Of the model, for the results.
        rounds: Samples of each.
        budget_s: Seconds after which no further round begins, see `time_candidates`.
        options: By backend.
        on_step: Told what happens next: "compile <backend>", then "round" after each round.
    """
    tell = on_step or (lambda _: None)
    results: dict[str, Result] = {}
    torch.compiler.reset()
    for backend in backends:
        tell(f"compile {backend}")
        given = (options or {}).get(backend)
        results[backend] = _compile_and_check(name, model, inputs, backend, given)
    runs: dict[str, Callable[[], Any]] = {"eager": lambda: call(model, inputs)}
    for backend, result in results.items():
        if result.compiled is not None and result.passed:
            runs[f"compiled {backend}"] = _runner(result.compiled, inputs)
    timings = time_candidates(runs, rounds, budget_s=budget_s, on_round=lambda: tell("round"))
    return [
        dataclasses.replace(
            result, eager=timings["eager"], timing=timings.get(f"compiled {backend}")
        )
        for backend, result in results.items()
    ]


def _runner(compiled: Compiled, inputs: Inputs) -> Callable[[], Any]:
    return lambda: call(compiled.function, inputs)


def _compile_and_check(
    name: str, model: nn.Module, inputs: Inputs, backend: str, options: Mapping[str, Any] | None
) -> Result:
    try:
        compiled = compile_model(model, inputs, backend, options=options)
        accuracy = check(model, compiled.function, inputs)
    except Exception as error:  # reported as the result: the others still have their turn
        return Result(name, backend, error=brief_error(error))
    return Result(name, backend, accuracy=accuracy, compiled=compiled, error=accuracy.detail)

"""Runs random graphs on a backend, and looks for the smallest graph that fails."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.conformance.outcomes import Check, Outcome, new_outcome
from dynamo_backends.conformance.rewrites.acceptance import Mismatch, mismatch
from dynamo_backends.conformance.rewrites.graphs import (
    FILLS,
    RandomGraph,
    extreme,
    random_graph,
    usual,
)
from dynamo_backends.conformance.rewrites.shrinking import Case, shrink
from dynamo_backends.conformance.subject import PROGRAMS, compiler_of, reports_itself
from dynamo_backends.conformance.workers import Worker
from dynamo_backends.interface.errors import brief_error
from dynamo_backends.interface.logs import silence_loggers
from dynamo_backends.interface.report import record


def in_words(failure: Mismatch | Exception) -> str:
    """Describes a failure in one line."""
    return brief_error(failure) if isinstance(failure, Exception) else str(failure)


def example(case: Case, backend: str, failure: str) -> str:
    """Returns a Python program that reproduces the failure of a random graph.

    Args:
        case: The graph and its inputs.
        backend: See `bench.backends.require`.
        failure: What fails, in words.
    """
    graph, names = case.graph, ", ".join(x.name for x in case.graph.inputs)
    usual = ", ".join(_usual(x.shape, x.dtype, x.size) for x in graph.inputs)
    imports, compiler = _backend(backend)
    if "F." in graph.source():
        imports.insert(0, "import torch.nn.functional as F")
    lines = [
        "import torch",
        *imports,
        "",
        graph.source(),
        "",
        f"compiled = torch.compile(f, {compiler})",
        f"compiled({usual})  # usual values",
        *(f"{x.name} = {_constant(case.values[x.name])}" for x in graph.inputs),
        f"print('eager   ', [y.tolist() for y in f({names})])",
        f"print('compiled', [y.tolist() for y in compiled({names})])",
        f"# {' '.join(failure.split())}",
    ]
    return "\n".join(lines) + "\n"


def _backend(name: str) -> tuple[list[str], str]:
    """Returns what is imported for a backend, and arguments of `torch.compile`."""
    place, _, function = name.rpartition(":")
    if place.endswith(".py"):
        path = Path(place)
        lines = ["import sys", "", f"sys.path.insert(0, {str(path.parent)!r})"]
        return [*lines, f"from {path.stem} import {function}"], f"backend={function}"
    if place:
        return [f"from {place} import {function}"], f"backend={function}"
    options = ', options={"min_block_size": 1}' if reports_itself(name) else ""
    return [], f'backend="{name}"{options}'


def _constant(x: Tensor) -> str:
    text = str(x.tolist()).replace("nan", 'float("nan")').replace("inf", 'float("inf")')
    return f"torch.tensor({text}, dtype={x.dtype})"


def _usual(shape: Sequence[int], dtype: torch.dtype, positions: int) -> str:
    size = list(shape)
    if positions or dtype == torch.bool:
        return f"torch.zeros({size}, dtype={dtype})"
    if dtype.is_floating_point:
        return f"torch.randn({size}, dtype={dtype})"
    return f"torch.ones({size}, dtype={dtype})"


_OPTIONS: dict[str, Any] = {**PROGRAMS, "fragmented": "keep"}
_NOISY = ("dynamo_backends", "torch")

_ASSUME_NO_OVERFLOW = ("tvm", "inductor_freezing", "inductor_max_autotune")
_OVERFLOW = "Integers beyond 2**63 on `tvm`, `inductor_freezing` and `inductor_max_autotune`."
_LARGE = 2**62

Failure = Mismatch | Exception
Compiled = Callable[..., Sequence[Tensor]]


def run(check: Check, backend: str, shrink_s: float = 30.0) -> Outcome:
    """Runs the graph of a seed: the first call with usual values, then calls with extreme ones.

    Args:
        check: Its name is the seed.
        backend: See `bench.backends.require`.
        shrink_s: Seconds in which a smaller graph is looked for, if this one fails.
    """
    with warnings.catch_warnings(), silence_loggers(*_NOISY), torch.no_grad():
        warnings.simplefilter("ignore")
        outcome = _Runner(backend).run(check, shrink_s)
    torch._dynamo.reset()
    return outcome


def _cases(seed: int) -> list[Case]:
    """Calls with usual values and with each kind of extreme ones."""
    graph = random_graph(seed)
    calls = [{x.name: extreme(x, fill, seed) for x in graph.inputs} for fill in FILLS]
    return [_usual_case(graph), *(Case(graph, values) for values in calls)]


def _usual_case(graph: RandomGraph) -> Case:
    return Case(graph, {x.name: usual(x, 0) for x in graph.inputs})


class _Runner:
    """Compiles graphs with a backend, each once, and with those of torch."""

    def __init__(self, backend: str):
        self.backend = backend
        self._references = ["aot_eager"] + ["inductor"] * backend.startswith("inductor")
        self._compiled: dict[Any, Compiled | Exception] = {}

    def run(self, check: Check, shrink_s: float) -> Outcome:
        """See the function."""
        outcome = new_outcome(check)
        cases = _cases(int(check.name))
        outcome.samples = len(cases)
        with record() as reports:
            failed = _first_failure(cases, self._compile(cases[0].graph))
        if failed is not None and self._is_refused_at_first(cases, failed[0]):
            outcome.reasons[f"verification of the first call: {in_words(failed[1])}"] += 1
        elif failed is not None:
            self._explain(*failed, outcome, shrink_s)
            return outcome
        for report in reports:
            for fallback in report.fallbacks:
                outcome.reasons[f"{fallback.op}: {fallback.reason}"] += 1
            outcome.reasons.update(report.runtime_fallbacks)
        outcome.settle()
        return outcome

    def _compile(self, graph: RandomGraph, backend: str = "", verify: str = "off") -> Compiled:
        """Returns the graph's function, which is compiled at its first call."""
        compiler = compiler_of(backend or self.backend, **{**_OPTIONS, "verify": verify})
        return torch.compile(graph.function(), backend=compiler, fullgraph=True, dynamic=False)

    def _is_refused_at_first(self, cases: Sequence[Case], failed: Case) -> bool:
        """Returns whether verification of the first call ends with right results in all."""
        if failed is not cases[0] or not reports_itself(self.backend):
            return False
        return _first_failure(cases, self._compile(failed.graph, verify="first")) is None

    def failure(self, case: Case, backend: str = "") -> Failure | None:
        """Returns what fails at a case after a first call with usual values; None: nothing."""
        shapes = tuple((x.shape, x.dtype) for x in case.graph.inputs)
        key = (case.graph.source(), shapes, backend)
        if key not in self._compiled:
            compiled = self._compile(case.graph, backend)
            try:
                _call(compiled, _usual_case(case.graph))
            except Exception as error:
                self._compiled[key] = error
            else:
                self._compiled[key] = compiled
        known = self._compiled[key]
        if isinstance(known, Exception):
            return known
        failed = _first_failure([case], known)
        return None if failed is None else failed[1]

    def _explain(self, case: Case, failure: Failure, outcome: Outcome, shrink_s: float) -> None:
        """Notes what fails, with the smallest case that does; or that it is torch's own."""
        if self._is_torchs(case, failure):
            outcome.fail("torch", f"{in_words(failure)}, as with torch's own backend")
            return
        raises = isinstance(failure, Exception)

        def fails(smaller: Case) -> bool:
            other = self.failure(smaller)
            if other is None or isinstance(other, Exception) != raises:
                return False
            return not self._is_torchs(smaller, other)

        if fails(case):
            case = shrink(case, fails, shrink_s)
            failure = self.failure(case) or failure
        outcome.fail("raises" if raises else "wrong", in_words(failure))
        if not raises and self.backend in _ASSUME_NO_OVERFLOW and _has_large_integers(case):
            outcome.status, outcome.declared = "declared", [_OVERFLOW]
        outcome.example = example(case, self.backend, in_words(failure))

    def _is_torchs(self, case: Case, failure: Failure) -> bool:
        """Returns whether a backend of torch fails at the same elements."""
        return any(_covers(self.failure(case, name), failure) for name in self._references)


def _has_large_integers(case: Case) -> bool:
    """Returns whether some int64 of a graph is so large that arithmetic may leave its range."""
    values = case.graph.run(case.values).values()
    large = (v for v in values if v.dtype == torch.int64 and v.numel())
    return any(bool(((v > _LARGE) | (v < -_LARGE)).any()) for v in large)


def _covers(other: Failure | None, failure: Failure) -> bool:
    """Returns whether another backend fails wherever one does."""
    if other is None or isinstance(other, Exception) != isinstance(failure, Exception):
        return False
    if isinstance(other, Exception) or isinstance(failure, Exception):
        return True
    if other.wrong is None or failure.wrong is None or other.output != failure.output:
        return (other.output, other.text) == (failure.output, failure.text) != (failure.output, "")
    return not bool((failure.wrong & ~other.wrong).any())


def _first_failure(cases: Sequence[Case], compiled: Compiled) -> tuple[Case, Failure] | None:
    for case in cases:
        try:
            results = _call(compiled, case)
        except Exception as error:
            return case, error
        wrong = mismatch(case.graph, case.values, results)
        if wrong is not None:
            return case, wrong
    return None


def _call(compiled: Compiled, case: Case) -> Sequence[Tensor]:
    return compiled(*(case.values[x.name].clone() for x in case.graph.inputs))


def smallest_crash(outcome: Outcome, backend: str, limit_s: float) -> Outcome:
    """Shrinks a graph that crashes or hangs a process, and adds it to the outcome.

    Args:
        outcome: Outcome of a graph that ended a process.
        backend: See `bench.backends.require`.
        limit_s: Seconds that a case may take; in four times as many a smaller one is looked for.
    """
    with Worker(_survives) as worker:

        def fails(case: Case) -> bool:
            return not worker.result((case, backend), lambda *_: False, limit_s)

        case = next((case for case in _cases(int(outcome.name)) if fails(case)), None)
        if case is None:
            text = f"{outcome.reason} after other graphs; in a process of its own it does not"
            return outcome.fail(outcome.status, text)
        case = shrink(case, fails, 4 * limit_s)
        outcome.example = example(case, backend, outcome.reason)
    return outcome


def _survives(given: tuple[Case, str]) -> bool:
    """Runs a case in a process of its own; True, if that is still there."""
    case, backend = given
    with warnings.catch_warnings(), silence_loggers(*_NOISY), torch.no_grad():
        warnings.simplefilter("ignore")
        _Runner(backend).failure(case)
    return True

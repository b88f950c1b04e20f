"""Measures the graphs of an explained model in eager and compiled, and why it is slower."""

import contextlib
import logging
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from dynamo_backends.bench.statistics import time_candidates
from dynamo_backends.capture.explain import Explainer
from dynamo_backends.capture.explanation import Explanation
from dynamo_backends.capture.switchable_graph import Float64Errors, synchronize_cuda
from dynamo_backends.interface.errors import brief_error
from dynamo_backends.interface.report import to_json_types
from dynamo_backends.workers.statistics import Ratio, speedup

log = logging.getLogger("dynamo_backends")

_PROFILED = 3  # calls under a profiler
_RANGE = re.compile(r"\S+ (inference|forward|backward|step) graph( \d+)?( (block|eager) \d+)?")


@dataclass(frozen=True)
class Timed:
    """Times of the same work in eager and compiled, sampled in the same rounds.

    Attributes:
        eager_s: Seconds in eager, by round; empty if it was not timed there.
        compiled_s: Seconds compiled, by round.
        speedup: Eager's median over the other, if both were timed.
    """

    eager_s: tuple[float, ...] = ()
    compiled_s: tuple[float, ...] = ()

    @property
    def speedup(self) -> Ratio | None:
        """Eager's median over the other's, with its 95% confidence interval."""
        rounds = min(len(self.eager_s), len(self.compiled_s))
        if not rounds or not all(self.compiled_s):
            return None
        return speedup(self.eager_s[:rounds], self.compiled_s[:rounds])


@dataclass(frozen=True)
class Times:
    """The measured times of an explained model.

    Attributes:
        call: Whole calls; with gradients, forward and backward.
        graphs: Of each captured graph, in the order of `Explanation.graphs`; None if the call did
            not run it. With gradients it is its forward part.
        outside: Compiled calls without the graphs: Dynamo's guards, what runs in eager outside, and
            backward.
        parts: Seconds a call of what profilers see, by the names of `runtime.program.part_names`.
        errors: Errors of each graph, against float64; None where that cannot be said.
        notes: What could not be measured, in sentences.
    """

    call: Timed
    graphs: tuple[Timed | None, ...]
    outside: Timed
    parts: Mapping[str, float] = field(default_factory=dict)
    errors: tuple[Float64Errors | None, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns the times in types that JSON has."""
        found: dict[str, Any] = to_json_types(self)
        return found


def break_even(compile_s: float | None, eager_s: float, own_s: float) -> float | None:
    """After how many calls compilation has paid for itself; infinity: never; None: unknown.

    Args:
        compile_s: Seconds of compilation.
        eager_s: Seconds of a call in eager.
        own_s: Seconds of a compiled call.
    """
    if compile_s is None:
        return None
    return math.ceil(compile_s / (eager_s - own_s)) if own_s < eager_s else math.inf


class _Rounds:
    """Takes notes of what each graph took, round by round.

    Args:
        explainer: Inside its `with` block.
        call: Calls the model compiled.
    """

    def __init__(self, explainer: Explainer, call: Callable[[], Any]):
        self._switches = explainer.switches()
        self._call = call
        self._last: dict[bool, list[float]] = {}
        self.rounds: dict[bool, list[list[float]]] = {False: [], True: []}

    def run(self, in_eager: bool) -> Any:
        """Returns one call with its graphs compiled or in eager."""
        for switch in self._switches:
            switch.in_eager = in_eager
            switch.reset_seconds()
        try:
            result = self._call()
        finally:
            self._last[in_eager] = [switch.seconds for switch in self._switches]
            for switch in self._switches:
                switch.in_eager = False
        return result

    def close_round(self) -> None:
        """Keeps what the last call of each kind took."""
        for in_eager, seconds in self._last.items():
            self.rounds[in_eager].append(seconds)

    def of_graphs(self) -> tuple[Timed | None, ...]:
        """Returns what each graph took; None if it never ran."""
        found: list[Timed | None] = []
        for i in range(len(self._switches)):
            eager, compiled = (tuple(r[i] for r in self.rounds[k]) for k in (True, False))
            found.append(Timed(eager, compiled) if any(compiled) else None)
        return tuple(found)


def measure(
    explainer: Explainer,
    eager: Callable[[], Any],
    compiled: Callable[[], Any],
    rounds: int,
    patience_s: float = 60.0,
) -> Times:
    """Times a model that has been called, in eager and compiled.

    Args:
        explainer: `Explainer(switched=True)`, inside its `with` block.
        eager: A call of the model.
        compiled: The same by the explainer.
        rounds: Samples of each.
        patience_s: Seconds after which no round begins, but there are always five.
    """
    notes: list[str] = []
    errors = _errors(explainer, compiled)
    noted = _Rounds(explainer, compiled)
    runs: dict[str, Callable[[], Any]] = {"eager": eager, "compiled": lambda: noted.run(False)}
    try:
        noted.run(True)
        runs["graphs in eager"] = lambda: noted.run(True)
    except Exception as error:
        notes.append(
            f"The graphs were not timed in eager, because eager raised {brief_error(error)}"
        )
    timings = time_candidates(
        runs,
        rounds,
        warmup=1,
        budget_s=patience_s,
        synchronize=synchronize_cuda,
        on_round=noted.close_round,
    )
    call = Timed(timings["eager"].samples, timings["compiled"].samples)
    within = [sum(seconds) for seconds in noted.rounds[False]]
    outside = tuple(max(0.0, a - b) for a, b in zip(call.compiled_s, within, strict=True))
    return Times(
        call, noted.of_graphs(), Timed((), outside), _parts(compiled, notes), errors, tuple(notes)
    )


def _errors(explainer: Explainer, compiled: Callable[[], Any]) -> tuple[Float64Errors | None, ...]:
    switches = explainer.switches()
    with contextlib.ExitStack() as stack:
        for switch in switches:
            stack.enter_context(switch.compare_next_call())
        compiled()
    return tuple(switch.errors for switch in switches)


def _parts(compiled: Callable[[], Any], notes: list[str]) -> dict[str, float]:
    """Seconds a call of each graph and part that has a name in traces."""
    try:
        with profile(activities=[ProfilerActivity.CPU]) as found:
            for _ in range(_PROFILED):
                compiled()
            synchronize_cuda()
    except Exception as error:  # one profiler at a time
        notes.append(
            f"The blocks were not timed, because torch's profiler raised {brief_error(error)}"
        )
        return {}
    seconds: dict[str, float] = {}
    for event in found.key_averages():
        if _RANGE.fullmatch(event.key):
            seconds[event.key] = event.cpu_time_total / 1e6 / _PROFILED
    return seconds


def gradients_too(call: Callable[[], Any], explainer: Explainer) -> Callable[[], Any]:
    """Wraps a model call so that it also runs the backward pass, if it has one.

    Args:
        call: A call of the model.
        explainer: See `Explainer.differentiate`.
    """
    if not torch.is_grad_enabled():
        return call
    return lambda: explainer.differentiate(call())


_TELLING = 0.1  # of a call
_PART = re.compile(r" (block|eager) \d+$")  # see `runtime.program.part_names`


def why_slower(explanation: Explanation, times: Times) -> tuple[str, ...]:
    """Returns what makes calls slower than in eager, in sentences; none if they are not.

    Args:
        explanation: What became of the model.
        times: What was measured of it.
    """
    found = times.call.speedup
    return () if found is None or found.high >= 1 else tuple(_reasons(explanation, times))


def _reasons(explanation: Explanation, times: Times) -> Iterator[str]:
    eager, own = (statistics.median(s) for s in (times.call.eager_s, times.call.compiled_s))
    outside = statistics.median(times.outside.compiled_s)
    trains = any(report.kind == "backward" for report in explanation.reports)
    if outside > _TELLING * own and not trains:  # else it holds the backward graphs
        yield (
            f"{outside / own:.0%} of the time of a call is spent outside of graphs: in Dynamo's "
            "guards, and in code that Dynamo runs in eager."
        )
    in_eager, on_backend = _by_place(times)
    if in_eager > _TELLING * own:
        yield (
            f"{in_eager / own:.0%} of the time of a call is spent in operators that run in eager "
            "between the compiled blocks."
        )
    padded = sum(s.calls for r in explanation.reports for s in r.served if s.by == "padded")
    if padded:
        yield (
            f"{padded} calls ran with padded inputs, whose programs also compute the padding. "
            "Sizes that occur often are compiled exactly."
        )
    if on_backend > eager:
        yield (
            f"The programs of {explanation.backend} take {on_backend * 1e3:.3g} ms per call, and "
            f"eager's kernels take {eager * 1e3:.3g} ms, so this backend does not make the model "
            'faster. backend="autotune" keeps eager where nothing is faster.'
        )


def _by_place(times: Times) -> tuple[float, float]:
    """Seconds of a call in parts in eager, and in blocks or graphs of one block."""
    places = {True: 0.0, False: 0.0}
    wholes = {_PART.sub("", name) for name in times.parts if _PART.search(name)}
    for name, seconds in times.parts.items():
        if name not in wholes:
            places[" eager " in name] += seconds
    return places[True], places[False]

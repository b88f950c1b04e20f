"""Compiles, verifies and times schedules of one function against its default schedule.

This happens in a process of its own (see `worker`), because programs may crash or hang.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.tvm.dtypes import TO_TORCH
from dynamo_backends.tvm.schedules import apply_default_schedule
from dynamo_backends.tvm.search import Proposal, Search, replayed
from dynamo_backends.tvm.session import target, use_threads, vector_lanes
from dynamo_backends.tvm.vendor import tvm
from dynamo_backends.verify.trials.judge import TOLERANCE
from dynamo_backends.workers.race import Race
from dynamo_backends.workers.statistics import Ratio

DEFAULT = "default"

_SAMPLES = 2
"""So many sets of inputs are the results compared on."""

_TIMINGS = 4
_TIMING_S = 1e-3
_MOST_CALLS = 100
_RACE_S = 6.0
_HOPELESS = 2.0
"""What takes so many times as long as the fastest at its first call is not called again."""

Kernel = Callable[[list[Tensor]], Any]


class Bench:
    """A function, its default schedule, and what is proposed instead.

    Args:
        function: Not scheduled.
        inputs: How many of its parameters are inputs; the others are its results.
        threads: That programs have.
        seed: Seed of proposals.
    """

    def __init__(self, function: Any, inputs: int, threads: int, seed: int):
        self._function = function
        self._inputs = inputs
        self._processor = target(threads)
        self._types = [signature(p) for p in function.params]
        self._given: list[Tensor] = []
        self._threads = threads
        self._search = Search(function, threads, seed)
        use_threads(threads)
        self._default = self.compiled(apply_default_schedule(function, threads, vector_lanes()))
        self._given = self._sample(0)
        self._expected = [self._results(self._default, self._sample(n)) for n in range(_SAMPLES)]
        self.refused: list[str] = []
        """Why schedules took no part in the last decision."""
        self.disturbed = False
        """Other processes had the processors during the last one, which so decided nothing."""
        self._best = math.inf
        args = self._arguments()
        self.seconds = self._best = self._time(self._default, args, _seconds(self._default, args))
        """Of the default schedule."""

    def attempt(self) -> tuple[Proposal, float] | None:
        """Measures one more schedule; None if there are no more.

        Raises:
            Exception: It cannot be compiled or is wrong; the message says so.
        """
        proposal = self._search.propose()
        if proposal is None:
            return None
        run = self.compiled(proposal.function)
        args = self._arguments()
        first = _seconds(run, args)
        self._compare(args[self._inputs :], 0)
        seconds = self._time(run, args, first)
        self._best = min(self._best, seconds)
        self._search.tell(proposal, seconds)
        return proposal, seconds

    def decide(self, traces: Sequence[Any]) -> tuple[int, str, Ratio] | None:
        """Returns which of some schedules is certainly faster than the default one, and right.

        Returns:
            Its place, the hash of its program, and how many times faster it is; None: none is, or
            others disturbed the race.
        """
        runs: dict[str, Kernel] = {DEFAULT: self._default}
        marks = {}
        self.refused.clear()
        for place, trace in enumerate(traces):
            try:
                found = replayed(self._function, trace, self._threads)
                run = self.compiled(found.function)
                for number in range(_SAMPLES):
                    self._compare(self._results(run, self._sample(number)), number)
            except Exception as error:  # what is wrong, or cannot be made again, is not used
                self.refused.append(f"schedule {place}: {type(error).__name__}: {error}")
                continue
            runs[str(place)], marks[str(place)] = run, found.mark
        if len(runs) == 1:
            return None
        measured = Race(runs, self._arguments, budget_s=_RACE_S).run(DEFAULT)
        self.disturbed = not measured.sure
        if self.disturbed:
            return None
        winner = measured.order[0]
        if winner == DEFAULT or DEFAULT in measured.equal:
            return None
        gain = measured.timings[winner].speedup
        return (int(winner), marks[winner], gain) if gain.low > 1 else None

    def compiled(self, function: Any) -> Kernel:
        """Returns a program of a scheduled function, on the list of its inputs and results."""
        module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
        program = tvm.compile(module, target=self._processor).jit()
        entry = program["main"]

        def run(args: list[Tensor]) -> None:
            entry(*args)

        return run

    def _time(self, run: Kernel, args: list[Tensor], first: float) -> float:
        """Seconds of a call: the shortest of a few, which is enough to lead a search."""
        if first > _HOPELESS * self._best:
            return first
        repeat = max(1, min(_MOST_CALLS, int(_TIMING_S / max(first, 1e-7))))
        return min(_seconds(run, args, repeat) for _ in range(_TIMINGS))

    def _arguments(self) -> list[Tensor]:
        return [*self._given, *self._blank()]

    def _sample(self, number: int) -> list[Tensor]:
        """Inputs: numbers of both signs, or such as variances are."""
        if number == 0 and self._given:
            return self._given
        generator = torch.Generator().manual_seed(number)
        return [
            _values(shape, dtype, number > 0, generator)
            for shape, dtype in self._types[: self._inputs]
        ]

    def _blank(self) -> list[Tensor]:
        """Results before a program has written them: of values that it will hardly write."""
        return [
            torch.full(shape, 1 if dtype is torch.bool else 77, dtype=dtype)
            for shape, dtype in self._types[self._inputs :]
        ]

    def _results(self, run: Kernel, given: list[Tensor]) -> list[Tensor]:
        results = self._blank()
        run([*given, *results])
        return results

    def _compare(self, results: Sequence[Tensor], number: int) -> None:
        for e, r in zip(self._expected[number], results, strict=True):
            if not agree(e, r):
                raise ValueError("its results are not those of the default schedule")


def _seconds(run: Kernel, args: list[Tensor], repeat: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        run(args)
    return (time.perf_counter() - start) / repeat


def signature(parameter: Any) -> tuple[list[int], torch.dtype]:
    """Shape and dtype of a function's parameter.

    Raises:
        ValueError: It is not a tensor of a known shape and of floating-point numbers or truth
            values. Integers may be indices, for which random ones are no substitute.
    """
    kind = parameter.ty
    shape = getattr(kind, "shape", None)
    if shape is None or not all(isinstance(n, tvm.tirx.IntImm) for n in shape):
        raise ValueError("a parameter is not a tensor of a known shape")
    dtype = TO_TORCH.get(str(kind.dtype))
    if dtype is None or not (dtype.is_floating_point or dtype is torch.bool):
        raise ValueError(f"a parameter is a tensor of {kind.dtype}")
    return [int(n) for n in shape], dtype


def _values(
    shape: Sequence[int], dtype: torch.dtype, positive: bool, generator: torch.Generator
) -> Tensor:
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if positive:
        return (torch.rand(shape, generator=generator) + 0.5).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def agree(expected: Tensor, result: Tensor) -> bool:
    """Returns whether two results differ only by rounding, with NaN and infinities alike."""
    tolerance = TOLERANCE.get(expected.dtype)
    if tolerance is None:
        return torch.equal(expected, result)
    finite = expected.isfinite()
    if not torch.equal(expected[~finite].nan_to_num(7), result[~finite].nan_to_num(7)):
        return False
    e, r = expected[finite].double(), result[finite].double()
    if not e.numel():
        return True
    return bool(((e - r).abs() <= tolerance * e.abs().max()).all())

"""Decides whether results of a random graph are right, without an absolute tolerance.

An element is right if it is of eager's kind (a number, NaN, inf, -inf) and one of these holds:

- it is within 1e-4 of eager's, relative to eager's; 2 units in the last place in 16 bits;
- the same to eager's with denormal numbers flushed to zero;
- it is at most ten times as far from the float64 reference as eager's;
- eager gives it for the same numbers elsewhere in memory, in larger matrix products or those whose
  sums run backwards, by torch's decompositions, or if functions of single elements
  round correctly: then eager has several results (`eager_paths`);
- eager itself moves as far, or to that kind, when inputs move by a millionth of themselves, or when
  calls round their results otherwise.

Of sums, differences, casts and moves alone (`operators.EXACT`) the last three do not hold: a
backend that computes them has no other result.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from dynamo_backends.conformance.rewrites.eager_variants import (
    DecompositionMode,
    PerturbedRoundingMode,
    make_eager_variants,
)
from dynamo_backends.conformance.rewrites.graphs import Call, RandomGraph, Values, evaluate
from dynamo_backends.conformance.rewrites.operators import EXACT

TOLERANCE = 1e-4
_MOVE = 1e-6
_ROUNDING = 2.5  # units in the last place: 3e-7 in float32
_FACTOR = 10.0
_OF_DENORMALS = 1e-2
_DIRECTIONS = (-1.0, -0.4, 0.0, 0.0, 0.4, 1.0)  # 0.4: one unit in the last place
_ROUNDINGS = 64
_SEEDS = 8  # of directions in which values are moved


class Mismatch(NamedTuple):
    """A wrong element, the first of a result.

    Attributes:
        output: Which result.
        where: Its index.
        eager: Eager's value.
        value: The backend's.
        text: What is wrong, where it is no element.
        wrong: Which elements are.
    """

    output: int
    where: tuple[int, ...] = ()
    eager: float = 0.0
    value: float = 0.0
    text: str = ""
    wrong: Tensor | None = None

    def __str__(self) -> str:
        """Returns the difference in words."""
        if self.text:
            return f"output {self.output} {self.text}"
        where = list(self.where)
        return f"output {self.output} at {where} is {self.value!r} instead of {self.eager!r}"


def mismatch(
    graph: RandomGraph, inputs: Mapping[str, Tensor], results: Sequence[Tensor]
) -> Mismatch | None:
    """Returns the first wrong element of results; None: all are right.

    Args:
        graph: The graph.
        inputs: What it was called with.
        results: The results in question.
    """
    values = graph.run(inputs)
    if len(results) != len(graph.outputs):
        return Mismatch(0, text=f"is one of {len(results)} instead of {len(graph.outputs)}")
    alternatives = _Alternatives(graph, inputs, values)
    for i, (name, result) in enumerate(zip(graph.outputs, results, strict=True)):
        eager = values[name]
        if (eager.dtype, eager.shape) != (result.dtype, result.shape):
            now, then = (f"{x.dtype} of {list(x.shape)}" for x in (result, eager))
            return Mismatch(i, text=f"is {now} instead of {then}")
        wrong = ~_is_close(eager, result)
        if wrong.any():
            wrong &= ~alternatives.allow(name, eager, result)
        if wrong.any():
            index = tuple(int(k) for k in wrong.nonzero()[0])
            return Mismatch(i, index, eager[index].item(), result[index].item(), wrong=wrong)
    return None


def _kind(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return torch.zeros(x.shape, dtype=torch.int8)
    return (
        x.isnan().to(torch.int8) + 2 * x.isposinf().to(torch.int8) + 3 * x.isneginf().to(torch.int8)
    )


def _is_close(eager: Tensor, result: Tensor, tolerance: float = TOLERANCE) -> Tensor:
    """Returns where a result is eager's but for 1e-4 of it: zeros, signs and kinds are the same."""
    if not eager.is_floating_point():
        return eager == result
    tolerance = max(tolerance, 2 * torch.finfo(eager.dtype).eps)
    e, r = eager.double(), result.double()
    return (_kind(e) == _kind(r)) & (~e.isfinite() | ((e - r).abs() <= tolerance * e.abs()))


class _Alternatives:
    """Other results that eager may give; each is computed on first use."""

    def __init__(self, graph: RandomGraph, inputs: Mapping[str, Tensor], values: Values):
        self.graph = graph
        self.inputs = inputs
        self.values = values
        self._flushed: list[Values] = []
        self._precise: Values = {}
        self._others: list[Values] = []
        self._moved: list[Values] = []

    def _is_exact(self, call: Call) -> bool:
        """Returns whether a call has one result; constants need not be numbers of 16 bits."""
        narrow = self.values[call.operands["x"]].dtype in (torch.float16, torch.bfloat16)
        return call.template in EXACT and (not narrow or call.template == "{x}.float()")

    def allow(self, name: str, eager: Tensor, result: Tensor) -> Tensor:
        """Returns where a result that is not close to eager's is right."""
        right = torch.zeros(eager.shape, dtype=torch.bool)
        self._flushed = self._flushed or list(_flushed(self.graph, self.inputs))
        self._precise = self._precise or self.graph.run_in_float64(self.inputs)
        is_exact = all(map(self._is_exact, self.graph.returning(name).calls))
        precise = self._precise[name].to(eager.dtype)
        for other in self._flushed:
            right |= _is_close(other[name], result) | _is_close(other[name], _flush(result))
            # Eager's own result depends on denormal numbers, which have few digits.
            depends = ~_is_close(other[name], eager)
            for exact in (eager, precise):
                right |= depends & _is_close(exact, result, _OF_DENORMALS)
        if is_exact:
            return right
        e, r, p = (x.double() for x in (eager, result, self._precise[name]))
        same_kind = _kind(eager) == _kind(result)
        right |= same_kind & ((r - p).abs() <= _FACTOR * (e - p).abs())
        self._others = self._others or list(_others(self.graph, self.inputs))
        for other in self._others:
            right |= _is_close(other[name], result)
        self._moved = self._moved or list(_moved(self.graph, self.inputs))
        return right | _is_reached(eager, result, [m[name] for m in self._moved])


def _is_reached(eager: Tensor, result: Tensor, moved: Sequence[Tensor]) -> Tensor:
    """Returns where eager moves as far as a result is from it, or to what it is."""
    e, r = eager.double(), result.double()
    reached = torch.zeros(eager.shape, dtype=torch.bool)
    farthest = torch.zeros(eager.shape, dtype=torch.float64)
    least, most = torch.full_like(e, torch.inf), torch.full_like(e, -torch.inf)
    for other in moved:
        m = other.double()
        reached |= ~r.isfinite() & (_kind(m) == _kind(r))
        step = (m - e).abs()
        farthest = torch.where(step.isfinite(), torch.maximum(farthest, step), farthest)
        least = torch.where(m.isfinite(), torch.minimum(least, m), least)
        most = torch.where(m.isfinite(), torch.maximum(most, m), most)
    between = (least - TOLERANCE * least.abs() <= r) & (r <= most + TOLERANCE * most.abs())
    near = torch.where(e.isfinite(), (r - e).abs() <= farthest, between)
    return reached | (r.isfinite() & near)


def _flushed(graph: RandomGraph, inputs: Mapping[str, Tensor]) -> Iterator[Values]:
    """Eager's results without denormal numbers: in inputs, in each call, or in both."""
    flushed = {n: _flush(x) for n, x in inputs.items()}
    yield graph.run(flushed)
    yield graph.run({n: _without_denormals(x) for n, x in inputs.items()})
    for values in (inputs, flushed):
        torch.set_flush_denormal(True)
        try:
            yield graph.run(values)
        finally:
            torch.set_flush_denormal(False)
    each = dict(flushed)
    for call in graph.calls:  # exp of -88, which torch's own kernels do not flush
        each[call.result] = _flush(evaluate(call, each))
    yield each


def _flush(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x
    return torch.where(x.abs() < torch.finfo(x.dtype).tiny, torch.zeros_like(x) * x, x)


def _without_denormals(x: Tensor) -> Tensor:
    """Returns the smallest normal numbers in their place."""
    if not x.is_floating_point():
        return x
    tiny = torch.tensor(torch.finfo(x.dtype).tiny, dtype=x.dtype)
    return torch.where((x.abs() < tiny) & (x != 0), tiny.copysign(x), x)


def _others(graph: RandomGraph, inputs: Mapping[str, Tensor]) -> Iterator[Values]:
    """Eager's results by its other paths, with and without denormal numbers in inputs."""
    flushed = {n: _flush(x) for n, x in inputs.items()}
    for path in make_eager_variants():
        for values in (inputs, flushed):
            with path:
                yield graph.run(values)


def _moved(graph: RandomGraph, inputs: Mapping[str, Tensor]) -> Iterator[Values]:
    """Eager's results for inputs that are a millionth larger or smaller; for other roundings."""
    for signs in _signs(list(inputs)):
        yield graph.run({n: _scaled(x, _MOVE, signs[n]) for n, x in inputs.items()})
    for seed in range(_ROUNDINGS):
        # Decompositions have more calls that round: the sum of a softmax.
        rounding = PerturbedRoundingMode(seed, lambda x, generator: _scaled(x, None, generator))
        with rounding, DecompositionMode() if seed % 2 else nullcontext():
            yield graph.run(inputs)


def _signs(names: Sequence[str]) -> Iterator[dict[str, "torch.Generator | float"]]:
    """Directions for each of some tensors: up, down, one alone, at random."""
    yield dict.fromkeys(names, 1.0)
    yield dict.fromkeys(names, -1.0)
    for name in names[:3] if len(names) > 1 else ():
        yield {n: float(n == name) for n in names}
        yield {n: -float(n == name) for n in names}
    for seed in range(_SEEDS):
        yield dict.fromkeys(names, torch.Generator().manual_seed(seed))


def _scaled(x: Tensor, by: float | None, sign: "torch.Generator | float") -> Tensor:
    """A tensor moved by a part of itself (None: by a rounding), each element in its direction."""
    if not x.is_floating_point():
        return x
    by = _ROUNDING * torch.finfo(x.dtype).eps if by is None else by
    signs = torch.ones(x.shape, dtype=torch.float64)
    if isinstance(sign, torch.Generator):
        choices = torch.tensor(_DIRECTIONS, dtype=torch.float64)
        signs = choices[torch.randint(len(choices), x.shape, generator=sign)]
        x = torch.where((x == 0) & (signs < 0), -x, x)  # see docs/differences.md
    else:
        signs *= sign
    return (x.double() * (1 + by * signs)).to(x.dtype)

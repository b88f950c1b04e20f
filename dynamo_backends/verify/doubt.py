"""Results that are not close to eager's: inexact, undetermined, or wrong."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends.interface.logs import silenced
from dynamo_backends.verify.noise import Noise
from dynamo_backends.verify.precise import graph_in_float64, widen
from dynamo_backends.verify.replay import Replay
from dynamo_backends.verify.rule import (
    TOLERANCE,
    distance,
    is_accurate,
    is_close,
    is_inexact,
    pattern_difference,
    relative_error,
)

log = logging.getLogger("dynamo_backends")

REDUCED_TOLERANCE = 0.1
"""With `precision="bf16"`: largest root mean square error of an output, relative to its root mean
square."""

_RUNS = 8  # with noise, at most
_TIMES = 8  # as far as noise moved an element, a result may be off
_UNEXPLAINED = 0.25  # part of the elements that differ for which noise need not account
_STRAY = 500  # of so many elements one more may be off, about as far as noise moved others
_ABOUT = 2  # times as far

View = Callable[[int, Tensor], Tensor]
"""What is compared of an output, given its position and its value."""


@dataclass(frozen=True)
class Doubt:
    """An output that differs from eager's.

    Attributes:
        expected: Eager's value.
        result: The compiled one, of the same dtype and shape.
    """

    expected: Tensor
    result: Tensor


def is_beyond_doubt(expected: Tensor, result: Tensor, reduced: bool = False) -> bool:
    """Returns whether a result is right by a look at eager's.

    Args:
        expected: Eager's.
        result: Of the same dtype and shape.
        reduced: Whether the user admits bfloat16.
    """
    if is_close(expected, result):
        return True
    if not reduced or not is_inexact(expected) or pattern_difference(expected, result):
        return False
    return relative_error([expected], [result]) <= REDUCED_TOLERANCE


def settle(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    doubts: dict[int, Doubt],
    reduced: bool = False,
    view: View = lambda place, value: value,
) -> tuple[int, str] | None:
    """Tells what is wrong from what is as accurate as eager, or undetermined.

    Args:
        module: The eager original.
        inputs: Its inputs.
        doubts: By position of the output; what `view` makes of them.
        reduced: Whether the user admits bfloat16.
        view: What is compared.

    Returns:
        The position of an output that is wrong, and how, in words; None: nothing is.
    """
    left = {place: _Spread(doubt) for place, doubt in doubts.items()}
    if not reduced:
        precise = _precise(module, inputs, left, view)
        for place, value in precise.items():
            doubt = left[place].doubt
            with silenced("torch._dynamo"):
                accurate = is_accurate(doubt.expected, doubt.result, value)
            accurate = accurate and not pattern_difference(doubt.expected, doubt.result)
            left[place].add(value)
            if accurate or not left[place].is_unexplained():
                del left[place]
    for seed in range(_RUNS):
        if not left:
            return None
        try:
            noisy = _replayed(Replay(module, left), inputs, view, call=Noise(seed, reduced))
        except Exception:  # where rounding decides whether eager raises
            log.debug("a graph cannot be replayed with noise", exc_info=True)
            break
        for place, value in noisy.items():
            left[place].add(value)
            if not left[place].is_unexplained():
                del left[place]
    if not left:
        return None
    place, spread = min(left.items())
    e, r = spread.doubt.expected, spread.doubt.result
    return place, pattern_difference(e, r) or distance(e, r)


def _precise(
    module: fx.GraphModule, inputs: Sequence[Any], places: dict[int, Any], view: View
) -> dict[int, Tensor]:
    try:
        replay = Replay(module, places, graph_in_float64(module.graph))
        return _replayed(replay, inputs, view, load=widen)
    except Exception:  # such as a cast to float32 in the middle: noise decides
        log.debug("a graph cannot be computed in float64", exc_info=True)
        return {}


def _replayed(replay: Replay, inputs: Sequence[Any], view: View, **how: Any) -> dict[int, Tensor]:
    found: dict[int, Tensor] = {}
    replay(inputs, lambda i, value: found.__setitem__(i, view(i, value)), **how)
    return found


class _Spread:
    """How far each element of an output moves when its computation is disturbed."""

    def __init__(self, doubt: Doubt):
        self.doubt = doubt
        self._expected = _comparable(doubt.expected)
        self._most = torch.zeros_like(self._expected.abs())
        strays = min(1 + self._most.numel() // _STRAY, self._most.numel())
        self._farthest = self._most.new_zeros(strays)

    def add(self, value: Tensor) -> None:
        """Notes what a disturbed computation made of the output."""
        if value.shape != self._expected.shape:
            self._most.fill_(torch.inf)
            return
        value = _comparable(value)
        moved = (value - self._expected).abs()
        same = (value == self._expected) | (value.isnan() & self._expected.isnan())
        moved = torch.where(same, 0.0, moved.nan_to_num(torch.inf, torch.inf))
        if not is_inexact(self.doubt.expected):
            moved[moved > 0] = torch.inf
        moved = moved.to(self._most.dtype)
        self._most = torch.maximum(self._most, moved)
        self._farthest = torch.maximum(self._farthest, _largest(moved, len(self._farthest)))

    def is_unexplained(self) -> bool:
        """Returns whether the result differs in more elements than those that move."""
        expected, result = self.doubt.expected, self.doubt.result
        if is_inexact(expected):
            e, r = self._expected, _comparable(result)
            off = ~torch.isclose(e, r, TOLERANCE, TOLERANCE, equal_nan=True)
            distances = (e - r).abs().nan_to_num(torch.inf, torch.inf)
            slack = TOLERANCE * (1 + e.abs().nan_to_num(0.0, 0.0, 0.0))
            unexplained = off & ~(distances <= _TIMES * self._most + slack)
            if self._are_strays(unexplained, distances):
                return False
        else:
            off = expected != result
            unexplained = off & ~self._most.isinf()
        return int(unexplained.sum()) > _UNEXPLAINED * int(off.sum())

    def _are_strays(self, unexplained: Tensor, distances: Tensor) -> bool:
        """Whether few elements are off, which noise reaches, and about as far as it moved others.

        The first step of Adam is the sign of the gradient, so that of a gradient near zero goes
        either way; `round` goes either way near a half. Noise turns some of these around, another
        program some others.
        """
        count = int(unexplained.sum())
        if not 0 < count <= len(self._farthest) or not bool(self._most[unexplained].all()):
            return False
        found = _largest(distances[unexplained], count)
        return bool((found <= _ABOUT * self._farthest[:count]).all())


def _largest(values: Tensor, count: int) -> Tensor:
    return values.flatten().topk(count).values


def _comparable(value: Tensor) -> Tensor:
    """In a type that has differences, and enough precision."""
    if value.layout != torch.strided:
        value = value.to_dense()
    return value.to(torch.complex128 if value.is_complex() else torch.float64)

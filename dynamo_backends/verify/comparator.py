"""Decides whether results are right; nothing else does.

A result is right if it is close to eager's; else, if it is as accurate as eager's by a reference in
float64; else, if it is about as far off as eager's own moves when the computation is disturbed as
rounding may disturb it. Each is asked only about outputs that have not passed the one before, and
so the reference is computed only where it is needed.

`Comparator` compares the outputs of a graph, one after the other as they come, and replays it for
those in doubt: blocks at their first call, and steps. `describe_difference` compares lists of
results with a reference that somebody has: candidates of autotune, packages, conformance,
benchmarks. Both share the first two questions. Trials of single calls have a stricter rule, element
by element (`trials/judge.py`); results in int8 are measured by what the user admits
(`int8/tolerance.py`).
"""

import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends.interface.logs import silence_loggers
from dynamo_backends.verify.mismatch import (
    describe_distance,
    describe_nonfinite_mismatch,
    describe_value_mismatch,
    is_inexact,
)
from dynamo_backends.verify.noise import Noise
from dynamo_backends.verify.reference import EagerInterpreter, graph_in_float64, widen_to_float64

log = logging.getLogger("dynamo_backends")

TOLERANCE = 1e-4
"""Absolute and relative difference from eager below which a result needs no reference."""

REDUCED_TOLERANCE = 0.1
"""With `precision="bf16"`: largest root mean square error of an output, relative to its root mean
square, however inexact eager itself is in bfloat16. (Under autocast that is 0.5% for torchvision's
initial ResNet-50, and 9% for one whose random weights keep activations at unit size.)"""

_CHUNK = 1 << 20  # elements that are compared at once: what this makes stays in the cache
_RUNS = 8  # with noise, at most
_TIMES = 8  # as far as noise moved an element, a result may be off
_UNEXPLAINED = 0.25  # part of the elements that differ for which noise need not account
_STRAY = 500  # of so many elements one more may be off, about as far as noise moved others
_ABOUT = 2  # times as far

View = Callable[[int, Tensor], Tensor]
"""What is compared of an output, given its position and its value."""


class Comparator:
    """Compares the outputs of a graph with eager's, one after the other, to be dropped at once.

    Args:
        module: The eager original.
        inputs: Returns its inputs, if they are needed.
        reduced: Whether the user admits bfloat16: so far off is noise then.
        view: What is compared.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Callable[[], Sequence[Any]],
        reduced: bool = False,
        view: View = lambda place, value: value,
    ):
        self._module, self._inputs = module, inputs
        self._reduced, self._view = reduced, view
        self._doubts: dict[int, UncertainOutput] = {}

    def add_output(self, place: int, expected: Tensor, result: Tensor) -> None:
        """Compares an output with eager's; keeps both for `find_mismatch` if it is in doubt.

        Args:
            place: Its position.
            expected: Eager's value; what `view` makes of it.
            result: The one in question, of the same dtype and shape; likewise.
        """
        if is_close(expected, result):
            return
        if not (self._reduced and _is_near(expected, result)):
            self._doubts[place] = UncertainOutput(expected, result)

    def find_mismatch(self) -> tuple[int, str] | None:
        """Returns position and description of the first wrong output; None if all are right."""
        left = self._doubts
        inputs = self._inputs() if left else ()
        if left and not self._reduced:
            for place, value in self._precise(inputs).items():
                if left[place].matches_reference(value):
                    del left[place]
        for seed in range(_RUNS):
            if not left:
                return None
            try:
                noise = Noise(seed, self._reduced)
                noisy = self._replayed(EagerInterpreter(self._module, left), inputs, call=noise)
            except Exception:  # where rounding decides whether eager raises
                log.debug("a graph cannot be replayed with noise", exc_info=True)
                break
            for place, value in noisy.items():
                if left[place].is_within_noise(value):
                    del left[place]
        if not left:
            return None
        place, spread = min(left.items())
        return place, spread.text

    def _precise(self, inputs: Sequence[Any]) -> Mapping[int, Tensor]:
        try:
            replay = EagerInterpreter(
                self._module, self._doubts, graph_in_float64(self._module.graph)
            )
            return self._replayed(replay, inputs, load=widen_to_float64)
        except Exception:  # such as a cast to float32 in the middle: noise decides
            log.debug("a graph cannot be computed in float64", exc_info=True)
            return {}

    def _replayed(
        self, replay: EagerInterpreter, inputs: Sequence[Any], **how: Any
    ) -> dict[int, Tensor]:
        found: dict[int, Tensor] = {}
        replay(inputs, lambda i, value: found.__setitem__(i, self._view(i, value)), **how)
        return found


def describe_difference(
    expected: Sequence[Any],
    results: Sequence[Any],
    precise: Sequence[Any] | Callable[[], Sequence[Any]],
    tolerance: float = TOLERANCE,
) -> str | None:
    """Describes the first result that is less accurate than eager's; None if none is.

    Args:
        expected: Eager's results.
        results: The results in question.
        precise: The same in float64, or what computes it where it is needed.
        tolerance: In place of `TOLERANCE`.
    """
    if len(expected) != len(results):
        return f"{len(results)} outputs instead of {len(expected)}"
    wide = None if callable(precise) else precise
    for i, (e, r) in enumerate(zip(expected, results, strict=True)):
        text = describe_value_mismatch(e, r)
        if text is None and isinstance(e, Tensor) and not is_close(e, r, tolerance):
            wide = precise() if wide is None and callable(precise) else wide
            assert wide is not None
            if not is_accurate(e, r, wide[i], tolerance):
                text = describe_nonfinite_mismatch(e, r) or describe_distance(e, r)
        if text is not None:
            return f"output {i} {text}"
    return None


def is_close(expected: Tensor, result: Tensor, tolerance: float = TOLERANCE) -> bool:
    """Returns whether a result is within the tolerance of eager's; NaN equals NaN.

    Args:
        expected: Eager's result.
        result: Result of the same dtype and shape.
        tolerance: Absolute and relative.
    """
    if expected.layout != torch.strided:
        expected, result = expected.to_dense(), result.to_dense()
    pairs = zip(_chunks(expected), _chunks(result), strict=True)
    return all(_is_close(e, r, tolerance) for e, r in pairs)


def _is_close(expected: Tensor, result: Tensor, tolerance: float) -> bool:
    if not is_inexact(expected):
        return torch.equal(expected, result)
    if expected.dtype.itemsize < 2:  # no arithmetic is defined on them
        expected, result = expected.float(), result.float()
    return torch.allclose(expected, result, tolerance, tolerance, equal_nan=True)


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """Views of parts of a tensor, the same ones for all tensors of a shape."""
    if tensor.numel() <= _CHUNK:
        yield tensor
        return
    longest = max(range(tensor.dim()), key=lambda d: tensor.shape[d])
    size = max(1, tensor.shape[longest] * _CHUNK // tensor.numel())
    for part in tensor.split(size, longest):
        yield from _chunks(part) if part.shape[longest] == 1 else (part,)


def _is_near(expected: Tensor, result: Tensor) -> bool:
    """Returns whether a result is as near to eager's as bfloat16 is."""
    if not is_inexact(expected) or describe_nonfinite_mismatch(expected, result):
        return False
    return relative_error([expected], [result]) <= REDUCED_TOLERANCE


def is_accurate(
    expected: Tensor, result: Tensor, precise: Tensor, tolerance: float = TOLERANCE
) -> bool:
    """Returns whether a result is close to eager's, or as near to float64 as eager's is."""
    if not is_inexact(expected):
        return torch.equal(expected, result)
    e, r, p = expected, result, precise
    if expected.layout == torch.strided and expected.dtype.itemsize > 1:
        if not describe_nonfinite_mismatch(expected, result):
            e, r, p = _finite(expected, result, precise)
        elif describe_nonfinite_mismatch(precise.to(result.dtype), result):
            return False  # what is NaN in eager alone, such as gelu(inf), need not be copied
    quiet = {"equal_nan": True, "log_error": lambda *_, **__: None}
    with silence_loggers("torch._dynamo"):
        return private.meets_benchmark_accuracy(e, r, p, tol=tolerance, **quiet)


def _finite(expected: Tensor, result: Tensor, precise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Selects the elements that are finite in eager's result, of all three tensors."""
    finite = expected.isfinite()
    if bool(finite.all()):
        return expected, result, precise
    precise = torch.where(precise.isfinite(), precise, expected.to(precise.dtype))
    return expected[finite], result[finite], precise[finite]


def relative_error(precise: Sequence[Any], results: Sequence[Any]) -> float:
    """Returns the largest RMS error of an output, relative to the output's own RMS."""
    worst = 0.0
    for p, r in zip(precise, results, strict=True):
        if not isinstance(p, Tensor) or not isinstance(r, Tensor) or not is_inexact(r):
            continue
        wide = torch.promote_types(r.dtype, torch.float64)
        p, r = p.detach().to(wide), r.detach().to(wide)
        usable = p.isfinite() & r.isfinite()
        p, r = p[usable], r[usable]
        if not p.numel():
            continue
        size = float(p.abs().square().mean().sqrt())
        error = float((p - r).abs().square().mean().sqrt())
        worst = max(worst, error / size if size else (math.inf if error else 0.0))
    return worst


class UncertainOutput:
    """An output that is not close to eager's, and how far rounding may move its elements.

    Args:
        expected: Eager's value.
        result: The compiled one, of the same dtype and shape.
    """

    def __init__(self, expected: Tensor, result: Tensor):
        self._eagers, self._result = expected, result

    @functools.cached_property
    def _expected(self) -> Tensor:
        return _comparable(self._eagers)

    @functools.cached_property
    def _most(self) -> Tensor:
        return torch.zeros_like(self._expected.abs())

    @functools.cached_property
    def _farthest(self) -> Tensor:
        return self._most.new_zeros(min(1 + self._most.numel() // _STRAY, self._most.numel()))

    @property
    def text(self) -> str:
        """Describes the mismatch: where NaN or infinities differ, or the largest difference."""
        return describe_nonfinite_mismatch(self._eagers, self._result) or describe_distance(
            self._eagers, self._result
        )

    def matches_reference(self, precise: Tensor) -> bool:
        """Returns whether the output is right by its float64 value, and notes that value."""
        accurate = is_accurate(self._eagers, self._result, precise)
        accurate = accurate and not describe_nonfinite_mismatch(self._eagers, self._result)
        self._add(precise)
        return accurate or not self._is_unexplained()

    def is_within_noise(self, disturbed: Tensor) -> bool:
        """Returns whether the output is no farther off than the disturbed values so far."""
        self._add(disturbed)
        return not self._is_unexplained()

    def _add(self, value: Tensor) -> None:
        if value.shape != self._expected.shape:
            self._most.fill_(torch.inf)
            return
        value = _comparable(value)
        moved = (value - self._expected).abs()
        same = (value == self._expected) | (value.isnan() & self._expected.isnan())
        moved = torch.where(same, 0.0, moved.nan_to_num(torch.inf, torch.inf))
        if not is_inexact(self._eagers):
            moved[moved > 0] = torch.inf
        moved = moved.to(self._most.dtype)
        self._most = torch.maximum(self._most, moved)
        self._farthest = torch.maximum(self._farthest, _largest(moved, len(self._farthest)))

    def _is_unexplained(self) -> bool:
        """Returns whether the result differs in more elements than those that move."""
        expected, result = self._eagers, self._result
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
        """Returns whether few elements are off, about as far as noise moves others.

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
    """Casts to a type that has differences, and enough precision."""
    if value.layout != torch.strided:
        value = value.to_dense()
    return value.to(torch.complex128 if value.is_complex() else torch.float64)

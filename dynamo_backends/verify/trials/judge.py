"""Judges what a compiled call does by what eager does, element by element.

An element is right if one of these holds:

- it is eager's, up to a relative error (of sums of products: of their largest one);
- both are smaller than the smallest normal number, which vendors flush to zero;
- the operator works element by element, and the two are near each other and of the same sign;
- it is not much farther from a reference in float64 than eager is;
- the reference moves a quarter as far when its inputs move by what rounding may do to them.

The reference is computed only where it is needed, which may take longer than the rest of a trial.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import OpOverload, counts_flops
from dynamo_backends.graph.call_arguments import is_pointwise
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.precision import ROUNDING, allows_tf32
from dynamo_backends.verify import module_in_float64, widen_to_float64
from dynamo_backends.verify.mismatch import (
    describe_layout_mismatch,
    find_output_aliases,
    is_inexact,
)
from dynamo_backends.verify.noise import UNWRITTEN

TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 5e-3,
    torch.bfloat16: 5e-2,
}
"""Relative error of one operator, by the dtype of its result."""

_OF_OTHERS = 0.25
"""The same for types of eight bits."""

_OWN = 10
"""A result may be so many times as far from the reference as eager's."""

_MOVES = 4
"""Sums round at each addition, where the inputs of the reference move once."""

_RANDOM = 4
"""Directions in which elements move by different amounts; one of them may move hardly at all."""

_OUT_OF_BOUNDS = re.compile(r"out of (DATA )?(bounds|range)")
"""In torch's errors of indices on CPUs, which are of different types."""

Run = Callable[[list[Any]], Sequence[Any]]
"""A compiled call, on the list of its inputs."""


class EagerRefusedError(Exception):
    """Raised when eager itself raises on the inputs of a trial, so they show nothing."""


class Judge:
    """Compares a compiled call's results with eager's, element by element.

    Args:
        graph: From `alone`.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._promised = [n.meta["val"].stride() for n in graph.outputs]

    def __call__(self, run: Run, args: Sequence[Any]) -> str | None:
        """Runs a compiled call and eager on inputs; returns what is wrong, or None.

        Args:
            run: The compiled call.
            args: Inputs of the trial.

        Raises:
            EagerRefused: Eager does not take these inputs, so they show nothing.
        """
        expectation = self.run_eager(args)
        return expectation.find_mismatch(run(list(args)))

    def run_eager(self, args: Sequence[Any]) -> "Expectation":
        """Runs eager on inputs that the compiled call may overwrite later.

        Raises:
            EagerRefused: See above.
        """
        if any(x.device.type != "cpu" and not x.dtype.is_floating_point for x in args):
            self._hold_indices(args)
        try:
            expected = self._graph.module(*args)
        except Exception as error:
            raise EagerRefusedError(type(error).__name__) from error
        return Expectation(self._graph, self._promised, args, expected)

    def _hold_indices(self, args: Sequence[Any]) -> None:
        """Raises `EagerRefusedError` if an index is out of bounds, which kills a GPU context.

        Raises:
            EagerRefused: There is one among the inputs.
        """
        try:
            self._graph.module(*(x.cpu() for x in args))
        except Exception as error:  # of others than those of indices the device itself is asked
            if _OUT_OF_BOUNDS.search(str(error)):
                raise EagerRefusedError(type(error).__name__) from error


class Expectation:
    """Eager's results of one trial, to which a compiled call's results are compared.

    Args:
        graph: From `alone`.
        promised: Strides that results may have instead of eager's.
        args: Inputs of the trial, on which the compiled call is then run.
        expected: What eager makes of them.
    """

    def __init__(
        self,
        graph: Graph,
        promised: Sequence[tuple[int, ...]],
        args: Sequence[Any],
        expected: Sequence[Any],
    ) -> None:
        self._graph = graph
        self._promised = promised
        self._args = args
        self._before = [x.clone() for x in args]
        self._expected = expected

    def find_mismatch(self, results: Sequence[Any]) -> str | None:
        """Describes what is wrong with a compiled call's results; None if nothing is.

        Raises:
            EagerRefused: The reference in float64 is needed, and eager does not compute it.
        """
        wrong = self._handling(results)
        if wrong is not None or self._graph.calls[0].target in UNWRITTEN:
            return wrong
        for i, (e, r) in enumerate(zip(self._expected, results, strict=True)):
            if not is_inexact(e):
                if not torch.equal(e, r):
                    return f"output {i} differs from eager in {int((e != r).sum())} elements"
            elif not bool((near := self._near(e, r)).all()):
                count = int((~(near | self._is_explained(i, e, r))).sum())
                if count:
                    return f"output {i} is less precise than eager's in {count} elements"
        return None

    def _near(self, e: Tensor, r: Tensor) -> Tensor:
        """Returns which elements are right without asking the float64 reference."""
        target, real = self._graph.calls[0].target, e.dtype.to_real()
        tolerance = TOLERANCE.get(real, _OF_OTHERS)
        if e.dtype.itemsize < 2:  # no arithmetic is defined on them
            e, r = e.float(), r.float()
        scale = e.abs()
        if isinstance(target, OpOverload) and counts_flops(target) and e.numel():
            scale = e.abs().nan_to_num(0, 0, 0).max().expand_as(scale)
            if e.device.type == "cuda" and allows_tf32(target):
                tolerance = max(tolerance, 2 * ROUNDING)  # of either factor
        error = (e - r).abs()
        near = (error <= tolerance * scale) & scale.isfinite()
        near |= (e == r) | (e.isnan() & r.isnan())
        smallest = torch.finfo(real).tiny if real.itemsize > 1 else 0.0
        near |= (e.abs() <= smallest) & (r.abs() <= smallest)
        if is_pointwise(target) and not e.is_complex():
            absolute = min(8 * torch.finfo(real).eps, 0.1 * tolerance)
            near |= (error <= absolute) & (error <= 0.25 * e.abs())
        return near

    def _is_explained(self, place: int, e: Tensor, r: Tensor) -> Tensor:
        """Returns which elements are as right as eager's by the float64 reference."""
        precise, moves = self._precise[place], self._moves[place]
        tolerance = TOLERANCE.get(e.dtype.to_real(), _OF_OTHERS)
        rounded = precise.to(e.dtype)
        e, r = e.to(precise.dtype), r.to(precise.dtype)
        own = ((e - precise).abs() * _OWN).nan_to_num(0, 0, 0)
        # Eager's own NaN where there is a number, such as gelu(inf), need not be copied.
        right = (r - precise).abs() <= torch.maximum(own, tolerance * precise.abs())
        right &= precise.isfinite()
        right |= r == rounded.to(precise.dtype)
        right |= (r.isnan() & precise.isnan()) | (((e - r).abs() <= _MOVES * moves) & r.isfinite())
        return right

    @functools.cached_property
    def _precise(self) -> Sequence[Tensor]:
        return self._reference(self._args)

    @functools.cached_property
    def _moves(self) -> Sequence[Tensor]:
        """Returns how far each finite element moves when the inputs are off by rounding."""
        generator = torch.Generator().manual_seed(0)
        far = [torch.zeros(p.shape, dtype=p.dtype.to_real(), device=p.device) if is_inexact(p)
               else torch.zeros(p.shape, device=p.device) for p in self._precise]  # fmt: skip
        same: list[list[Any]] = [[direction] * len(self._args) for direction in (1.0, -1.0)]
        random = [[_random_direction(x, generator) for x in self._args] for _ in range(_RANDOM)]
        for each in (*same, *random):
            args = [_moved(x, along) for x, along in zip(self._args, each, strict=True)]
            for i, (p, q) in enumerate(zip(self._precise, self._reference(args), strict=True)):
                if is_inexact(p):
                    far[i] = torch.maximum(far[i], (p - q).abs().nan_to_num(0, 0, 0))
        return far

    @functools.cached_property
    def _module_in_float64(self) -> fx.GraphModule:
        return module_in_float64(self._graph.module)

    def _reference(self, args: Sequence[Any]) -> Sequence[Tensor]:
        try:
            precise: Sequence[Tensor] = self._module_in_float64(*map(widen_to_float64, args))
        except Exception as error:
            raise EagerRefusedError(type(error).__name__) from error
        return precise

    def _handling(self, results: Sequence[Any]) -> str | None:
        """Describes what is wrong except values: count, layout, aliasing, written inputs."""
        args, expected = self._args, self._expected
        if len(results) != len(expected):
            return f"results are {len(results)} instead of {len(expected)}"
        for i, (e, r, promised) in enumerate(zip(expected, results, self._promised, strict=True)):
            text = describe_layout_mismatch(e, r, promised)
            if text is not None:
                return f"output {i} {text}"
        pairs = zip(
            find_output_aliases(args, expected), find_output_aliases(args, results), strict=True
        )
        for i, (usual, found) in enumerate(pairs):
            if not set(found) <= set(usual):
                return f"output {i} shares memory that eager's does not"
        for i, (now, then) in enumerate(zip(args, self._before, strict=True)):
            if not _is_same(now, then):
                return f"run writes to input {i}"
        return None


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors have the same elements; NaN equals NaN."""
    return bool(((tensor == other) | ((tensor != tensor) & (other != other))).all())


def _random_direction(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Draws how far each element moves, in [0.5, 1) and either sign, so sums move too."""
    signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
    far = 0.5 + 0.5 * torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
    return (signs * far).to(tensor.device)


def _moved(tensor: Tensor, direction: Any) -> Tensor:
    """Returns a wide copy of an input that is off by a few roundings in a direction."""
    if not is_inexact(tensor) or tensor.dtype.itemsize < 2:
        return tensor
    eps = torch.finfo(tensor.dtype.to_real()).eps
    wide: Tensor = widen_to_float64(tensor)
    return wide * (1 + direction * eps * (8 if eps < 1e-4 else 2))

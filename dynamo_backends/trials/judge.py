"""Judges what a compiled call does by what eager does.

A result that is near eager's is right whatever a reference in float64 says, by the accuracy rule
itself. Where it is not near, that is computed, which may take longer than the rest of a trial.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.graph.calls import is_pointwise
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.tf32 import ROUNDING, may_be_tf32
from dynamo_backends.interface.logs import silenced
from dynamo_backends.verify import difference, in_float64, widen
from dynamo_backends.verify.noise import UNWRITTEN
from dynamo_backends.verify.rule import TOLERANCE as CLOSE
from dynamo_backends.verify.rule import aliases, is_inexact, shape_difference

# The accuracy rule is about a whole tensor, as wide for float64 as for float32, and does not look
# further where the reference has NaN.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 5e-3,
    torch.bfloat16: 5e-2,
}

_OUT_OF_BOUNDS = re.compile(r"out of (DATA )?(bounds|range)")
"""In torch's errors of indices on CPUs, which are of different types."""

Run = Callable[[list[Any]], Sequence[Any]]
"""A compiled call, on the list of its inputs."""


class EagerRefused(Exception):
    """Eager does not take the inputs of a trial."""


class Judge:
    """Compares what a compiled call does with eager.

    Args:
        graph: From `alone`.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._promised = [n.meta["val"].stride() for n in graph.outputs]

    def __call__(self, run: Run, args: Sequence[Any]) -> str | None:
        """What is wrong with a call's results, in words; None if nothing is.

        Args:
            run: The compiled call.
            args: Inputs of the trial.

        Raises:
            EagerRefused: Eager does not take these inputs, so they show nothing.
        """
        expectation = self.expect(args)
        return expectation.wrong(run(list(args)))

    def expect(self, args: Sequence[Any]) -> "Expectation":
        """What eager makes of the inputs of a trial, before the compiled call is run on them.

        Raises:
            EagerRefused: See above.
        """
        if any(x.device.type != "cpu" and not x.dtype.is_floating_point for x in args):
            self._hold_indices(args)
        try:
            expected = self._graph.module(*args)
        except Exception as error:
            raise EagerRefused(type(error).__name__) from error
        return Expectation(self._graph, self._promised, args, expected)

    def _hold_indices(self, args: Sequence[Any]) -> None:
        """On a CPU an index out of bounds is an error; a GPU does no more for the process after it.

        Raises:
            EagerRefused: There is one among the inputs.
        """
        try:
            self._graph.module(*(x.cpu() for x in args))
        except Exception as error:  # of others than those of indices the device itself is asked
            if _OUT_OF_BOUNDS.search(str(error)):
                raise EagerRefused(type(error).__name__) from error


class Expectation:
    """What a compiled call is to make of its inputs.

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

    def wrong(self, results: Sequence[Any]) -> str | None:
        """What is wrong with results, in words; None if nothing is.

        Raises:
            EagerRefused: The reference in float64 is needed, and eager does not compute it.
        """
        wrong = self._handling(results)
        if wrong is not None or self._graph.calls[0].target in UNWRITTEN:
            return wrong
        if self._is_beyond_doubt(results):
            return None
        expected, precise = self._expected, self._precise()
        compared: Sequence[Sequence[Any]] = (expected, results, precise)
        if not is_pointwise(self._graph.calls[0].target):
            scaled = [_of_size_one(*three) for three in zip(*compared, strict=True)]
            compared = list(zip(*scaled, strict=True))
        with silenced("torch._dynamo"):  # which says that a reference has NaN
            wrong = difference(*compared)
        return self._imprecise(results, precise) if wrong is None else wrong

    def _precise(self) -> Sequence[Tensor]:
        try:
            precise: Sequence[Tensor] = in_float64(self._graph.module)(*map(widen, self._args))
        except Exception as error:
            raise EagerRefused(type(error).__name__) from error
        return precise

    def _is_beyond_doubt(self, results: Sequence[Tensor]) -> bool:
        """Whether results are right whatever the reference in float64 is."""
        elementwise = is_pointwise(self._graph.calls[0].target)
        for e, r in zip(self._expected, results, strict=True):
            if not is_inexact(e):
                if not torch.equal(e, r):
                    return False
                continue
            if e.dtype not in TOLERANCE:
                return False
            if e.numel() and not elementwise:
                # The reference may be half as large as eager's result, by which the rule scales.
                part = min(1.0, 2 * _part(e))
                e, r = e * part, r * part
            if not torch.allclose(e, r, CLOSE, CLOSE, equal_nan=True):
                return False
        return self._imprecise(results, self._expected) is None

    def _handling(self, results: Sequence[Any]) -> str | None:
        """What is wrong about anything but the values of the results."""
        args, expected = self._args, self._expected
        if len(results) != len(expected):
            return f"results are {len(results)} instead of {len(expected)}"
        for i, (e, r, promised) in enumerate(zip(expected, results, self._promised, strict=True)):
            text = shape_difference(e, r, promised)
            if text is not None:
                return f"output {i} {text}"
        pairs = zip(aliases(args, expected), aliases(args, results), strict=True)
        for i, (usual, found) in enumerate(pairs):
            if not set(found) <= set(usual):
                return f"output {i} shares memory that eager's does not"
        for i, (now, then) in enumerate(zip(args, self._before, strict=True)):
            if not _is_same(now, then):
                return f"run writes to input {i}"
        return None

    def _imprecise(self, results: Sequence[Tensor], precise: Sequence[Tensor]) -> str | None:
        elementwise = is_pointwise(self._graph.calls[0].target)
        for i, (e, r, p) in enumerate(zip(self._expected, results, precise, strict=True)):
            tolerance = TOLERANCE.get(e.dtype)
            if tolerance is None or not e.numel():
                continue
            if e.device.type == "cuda" and may_be_tf32(self._graph.calls[0].target):
                tolerance = max(tolerance, 2 * ROUNDING)  # of either factor
            both_nan = e.isnan() & r.isnan()
            # Eager's own NaN where there is a number, such as gelu(inf), need not be copied.
            e = torch.where(e.isnan() & ~p.isnan(), p.to(e.dtype), e)
            finite = e.nan_to_num(0, 0, 0).abs()
            scale = finite + 0.1 if elementwise else finite.max()
            if not (((e - r).abs() <= tolerance * scale) | (e == r) | both_nan).all():
                return f"output {i} is less precise than eager's"
        return None


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors of a kind have the same elements, NaN among them."""
    return bool(((tensor == other) | ((tensor != tensor) & (other != other))).all())


def _of_size_one(e: Tensor, r: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three results of a call, divided by a power of two if the precise one is large.

    The accuracy rule allows an absolute error besides eager's own, which for sums of thousands of
    numbers, as in a trial's convolution, would be a smaller and smaller part of the results.
    """
    if not p.is_floating_point() or e.dtype != r.dtype or not p.numel():
        return e, r, p
    part = _part(p)
    return (e, r, p) if part == 1 else (e * part, r * part, p * part)


def _part(tensor: Tensor) -> float:
    """The power of two that makes the largest number of a tensor about 1; 1 if none is larger."""
    largest = tensor.nan_to_num(0, 0, 0).abs().max().item()
    return 2.0 ** -math.floor(math.log2(largest)) if largest > 1 else 1.0

"""Checks whether a compiled model is as accurate as eager, by the rule of PyTorch's runners."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dynamo_backends.bench.suites.case import Inputs, call
from dynamo_backends.verify.comparator import TOLERANCE, describe_difference

_CHUNK = 1 << 22  # elements


@dataclass(frozen=True)
class Accuracy:
    """The comparison of a compiled model's outputs with eager's.

    Attributes:
        passed: Whether they are as accurate as eager's.
        max_abs: Largest absolute difference from eager.
        max_rel: Largest difference within one output, relative to that output's largest value.
        detail: What is wrong; empty if nothing is.
    """

    passed: bool
    max_abs: float
    max_rel: float
    detail: str = ""


def check(
    model: nn.Module,
    compiled: Callable[..., Any],
    inputs: Inputs,
    tolerance: float = TOLERANCE,
) -> Accuracy:
    """Runs a model in eager, compiled and in float64, and compares.

    Results pass if they are within the tolerance of eager's, or if their error against the float64
    results is no more than a small multiple of eager's own: `torch._dynamo.utils.same`. Shapes,
    dtypes and the structure of the outputs must be eager's as well.

    Args:
        model: The model, in eval mode.
        compiled: Called with the same inputs.
        inputs: Positional or keyword arguments; not changed.
        tolerance: Absolute and relative.
    """
    expected = call(model, copy.deepcopy(inputs))
    result = call(compiled, copy.deepcopy(inputs))
    precise = reference(model, inputs)
    return compare_outputs(expected, result, precise, tolerance)


@torch.no_grad()
def reference(model: nn.Module, inputs: Inputs) -> Any:
    """Returns the outputs of a copy of the model in float64 for the same inputs in float64."""
    return call(copy.deepcopy(model).double(), pytree.tree_map_only(Tensor, _double, inputs))


def compare_outputs(
    expected: Any,
    result: Any,
    precise: Any,
    tolerance: float = TOLERANCE,
    allowed: Any = None,
) -> Accuracy:
    """Compares nested outputs with eager's.

    Args:
        expected: Eager's.
        result: Those in question.
        precise: The same in float64.
        tolerance: Absolute and relative.
        allowed: Eager's in a lower precision (see `as_precise`), if results may be as
            inexact as these.
    """
    leaves, structure = pytree.tree_flatten(expected)
    results, result_structure = pytree.tree_flatten(result)
    if structure != result_structure:
        found = f"the outputs have the structure {result_structure} instead of {structure}"
        return Accuracy(False, float("inf"), float("inf"), found)
    precise_leaves = pytree.tree_leaves(precise)
    standards = leaves if allowed is None else pytree.tree_leaves(allowed)
    max_abs = max_rel = 0.0
    for e, r in zip(leaves, results, strict=True):
        absolute, relative = distance(e, r)
        max_abs, max_rel = max(max_abs, absolute), max(max_rel, relative)
    wrong = describe_difference(standards, results, precise_leaves, tolerance) or ""
    return Accuracy(not wrong, max_abs, max_rel, wrong)


def as_precise(expected: Any, inexact: Any) -> Any:
    """Casts inexact floating-point results to the dtypes of exact ones."""

    def each(exact: Any, found: Any) -> Any:
        floating = isinstance(exact, Tensor) and exact.is_floating_point()
        return found.to(exact.dtype) if floating else exact

    return pytree.tree_map(each, expected, inexact)


def distance(expected: Any, result: Any) -> tuple[float, float]:
    """Largest absolute difference of two tensors, and the same relative to the largest value.

    Returns:
        Infinities if they cannot be compared; equal NaNs and infinities count as no difference.
    """
    if not isinstance(expected, Tensor) or not isinstance(result, Tensor):
        return 0.0, 0.0
    if expected.shape != result.shape:
        return float("inf"), float("inf")
    largest, scale = 0.0, 0.0
    flat = (t.detach().flatten().split(_CHUNK) for t in (expected, result))
    for pair in zip(*flat, strict=True):  # float64 of all would take many times the memory
        e, r = (t.to("cpu", _widest(t.dtype)) for t in pair)
        finite = e.abs()[e.isfinite()]
        scale = max(scale, finite.max().item() if finite.numel() else 0.0)
        unequal = (e != r) & ~(e.isnan() & r.isnan())
        if bool(unequal.any()):
            difference = (e[unequal] - r[unequal]).abs().max().item()
            if difference != difference:  # one of the two is NaN
                return float("inf"), float("inf")
            largest = max(largest, difference)
    if not largest:
        return 0.0, 0.0
    return largest, largest / scale if scale else float("inf")


def _widest(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor.clone()

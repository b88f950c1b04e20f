"""Compares two results: values, dtypes, strides, aliases and mutations."""

import copy
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dynamo_backends.verify import describe_difference, mismatch


def ensure(holds: object, text: str) -> None:
    """Raises an AssertionError, also where Python leaves out assert statements."""
    if not holds:
        raise AssertionError(text)


def widen(value: Any) -> Any:
    """Floating-point tensors and modules in float64."""
    if isinstance(value, torch.nn.Module):
        return copy.deepcopy(value).double()
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.double()
    return value


def copy_inputs(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies that keep strides and storage offsets."""
    return tuple(copy.deepcopy(x) for x in inputs)


def tensors(tree: Any) -> list[torch.Tensor]:
    """Returns the tensors of a nest, in order."""
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def assert_same(expected: Any, results: Any, precise: Any, word: str = "output") -> None:
    """Asserts equal structure, dtypes and strides, and values as accurate as eager's.

    Args:
        expected: Eager's.
        results: Those in question.
        precise: The same in float64.
        word: What they are called in errors.

    Raises:
        AssertionError: They are not the same.
    """
    flat, spec = pytree.tree_flatten(expected)
    flat_results, result_spec = pytree.tree_flatten(results)
    ensure(spec == result_spec, f"the structure is {result_spec} instead of {spec}")
    wrong = describe_difference(flat, flat_results, pytree.tree_leaves(precise))
    ensure(wrong is None, str(wrong).replace("output", word))
    for i, (e, r) in enumerate(zip(flat, flat_results, strict=True)):
        if isinstance(e, torch.Tensor) and e.numel():
            strides = f"{word} {i} has strides {r.stride()} instead of {e.stride()}"
            ensure(e.stride() == r.stride(), strides)
            ensure(e.requires_grad == r.requires_grad, f"{word} {i}: requires_grad is not eager's")


def assert_close(found: Any, expected: Any) -> None:
    """Asserts values within 1e-4 of eager's, where there is no float64 reference.

    Raises:
        AssertionError: They are not, or their number, shapes or dtypes differ.
    """
    leaves = pytree.tree_leaves(expected)
    wrong = describe_difference(leaves, pytree.tree_leaves(found), leaves)
    ensure(wrong is None, str(wrong))


def aliases(results: Any, inputs: Any) -> list[tuple[int, ...]]:
    """Returns for each output which inputs and outputs share its memory."""
    return mismatch.find_output_aliases(tensors(inputs), tensors(results))

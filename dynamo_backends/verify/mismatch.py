"""In what results differ from eager's, in words."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends import _torch_private as private


def describe_value_mismatch(expected: Any, result: Any) -> str | None:
    """Describes a wrong type, dtype or shape, or a wrong non-tensor; None if none is."""
    if isinstance(expected, Tensor) != isinstance(result, Tensor):
        return f"is a {type(result).__name__} instead of a {type(expected).__name__}"
    if not isinstance(expected, Tensor):  # NaN is NaN's equal here
        same = expected == result or (expected != expected and result != result)
        return None if same else f"is {result!r} instead of {expected!r}"
    if (expected.dtype, expected.shape) != (result.dtype, result.shape):
        return f"is {describe_tensor(result)} instead of {describe_tensor(expected)}"
    return None


def describe_layout_mismatch(
    expected: Any, result: Any, promised: Collection[int] | None = None
) -> str | None:
    """Describes a wrong type, dtype, shape, device or strides; None if none is wrong.

    Args:
        expected: Eager's result.
        result: The one in question.
        promised: Strides that it may have instead of eager's.
    """
    wrong = describe_value_mismatch(expected, result)
    if wrong is not None or not isinstance(expected, Tensor):
        return wrong
    if (expected.device, expected.layout) != (result.device, result.layout):
        return f"is {describe_tensor(result)} instead of {describe_tensor(expected)}"
    if expected.layout != torch.strided:
        return None
    if not _strides_agree(expected, result.stride(), expected.stride(), promised):
        return f"has strides {result.stride()} instead of {expected.stride()}"
    return None


def _strides_agree(tensor: Tensor, given: Sequence[int], *allowed: Collection[int] | None) -> bool:
    matters = [n > 1 for n in tensor.shape]
    if not tensor.numel():
        return True
    for strides in allowed:
        if strides is None or len(strides) != len(matters):
            continue
        pairs = zip(given, strides, matters, strict=True)
        if all(g == s or not m for g, s, m in pairs):
            return True
    return False


def describe_nonfinite_mismatch(expected: Any, result: Any) -> str:
    """Describes how NaN and infinities lie in other places than eager's; "" if nowhere."""
    if not isinstance(expected, Tensor) or not is_inexact(expected):
        return ""
    if not isinstance(result, Tensor):
        return ""
    if not torch.equal(expected.isnan(), result.isnan()):
        return "has NaN where eager has not, or the reverse"
    if not torch.equal(infinite := expected.isinf(), result.isinf()):
        return "has infinities where eager has not, or the reverse"
    if not expected.is_complex() and expected.layout == torch.strided and bool(infinite.any()):
        signs = (x[infinite].float() > 0 for x in (expected, result))
        if not torch.equal(*signs):
            return "has infinities of the other sign than eager's"
    return ""


def describe_distance(expected: Tensor, result: Tensor) -> str:
    """Describes how far a result is off: largest difference, or number of elements."""
    if not is_inexact(expected):
        return f"differs from eager in {int((expected != result).sum())} elements"
    wide = torch.promote_types(expected.dtype, torch.float64)
    distances = (expected.to(wide) - result.to(wide)).abs()
    worst = distances.nan_to_num(0.0, torch.inf).max()  # NaN and infinities are eager's
    return f"differs from eager by up to {worst:.3e}"


def describe_tensor(tensor: Tensor) -> str:
    """Formats a tensor's dtype, shape and device: "float32[3, 4] on cuda:0"."""
    name = str(tensor.dtype).removeprefix("torch.")
    where = "" if tensor.device.type == "cpu" else f" on {tensor.device}"
    return f"{name}{list(tensor.shape)}{where}"


def is_inexact(tensor: Tensor) -> bool:
    """Returns whether a tensor's dtype is floating-point or complex."""
    return tensor.is_floating_point() or tensor.is_complex()


def storage_address(tensor: Any) -> int | None:
    """Returns the address of a tensor's storage; None if it is empty or has none."""
    if not isinstance(tensor, Tensor) or type(tensor) not in (Tensor, torch.nn.Parameter):
        return None
    if tensor.layout != torch.strided or not private.has_storage(tensor):
        return None
    return tensor.untyped_storage().data_ptr() or None


def find_output_aliases(args: Sequence[Any], results: Sequence[Any]) -> list[tuple[int, ...]]:
    """Returns, per output, the indices in `[*args, *results]` that share its storage."""
    everything = [*args, *results]
    places = [
        storage_address(x) if isinstance(x, Tensor) and x.numel() else None for x in everything
    ]
    return [
        tuple(i for i, p in enumerate(places) if p is not None and p == place)
        for place in places[len(args) :]
    ]

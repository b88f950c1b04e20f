"""When results are right: the rule of autotune, of `verify`, and of the tests."""

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends import _torch_private as private

TOLERANCE = 1e-4
"""Absolute and relative difference from eager below which a result needs no reference."""

_CHUNK = 1 << 20  # elements that are compared at once: what this makes stays in the cache


def memory_of(tensor: Any) -> int | None:
    """Where a tensor's memory begins; None for what is empty or has none of its own kind."""
    if not isinstance(tensor, Tensor) or type(tensor) not in (Tensor, torch.nn.Parameter):
        return None
    if tensor.layout != torch.strided or not private.has_storage(tensor):
        return None
    return tensor.untyped_storage().data_ptr() or None


def difference(
    expected: Sequence[Any], results: Sequence[Any], precise: Sequence[Any]
) -> str | None:
    """What distinguishes results from eager's, in words; None if they are as accurate.

    Args:
        expected: Eager's results.
        results: The results in question.
        precise: The same in float64.
    """
    if len(expected) != len(results):
        return f"{len(results)} outputs instead of {len(expected)}"
    for i, (e, r, p) in enumerate(zip(expected, results, precise, strict=True)):
        if not isinstance(e, Tensor):
            if not _are_equal(e, r):
                return f"output {i} is {r!r} instead of {e!r}"
            continue
        if e.dtype != r.dtype or e.shape != r.shape:
            return f"output {i} is {brief(r)} instead of {brief(e)}"
        if not is_accurate(e, r, p):
            return f"output {i} {distance(e, r)}"
    return None


def _are_equal(expected: Any, result: Any) -> bool:
    """Whether two values that are no tensors are equal, or both NaN."""
    return bool(expected == result or (expected != expected and result != result))


def is_accurate(expected: Tensor, result: Tensor, precise: Tensor) -> bool:
    """Whether a result of eager's dtype and shape is close to eager's, or as close to float64's."""
    if is_inexact(expected):
        expected, result, precise = _finite(expected, result, precise)
        quiet = {"equal_nan": True, "log_error": lambda *_, **__: None}
        return private.same(expected, result, precise, **quiet)
    return torch.equal(expected, result)


def _finite(expected: Tensor, result: Tensor, precise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The finite elements; with a NaN among them no error would be told from another.

    Where results differ in what is finite, all elements.
    """
    if expected.layout != torch.strided or expected.dtype.itemsize < 2:
        return expected, result, precise
    finite = expected.isfinite()
    if bool(finite.all()) or pattern_difference(expected, result):
        return expected, result, precise
    precise = torch.where(precise.isfinite(), precise, expected.to(precise.dtype))
    return expected[finite], result[finite], precise[finite]


def distance(expected: Tensor, result: Tensor) -> str:
    """How far a result is off, in words."""
    if not is_inexact(expected):
        return f"differs from eager in {int((expected != result).sum())} elements"
    wide = torch.promote_types(expected.dtype, torch.float64)
    worst = (expected.to(wide) - result.to(wide)).abs().max()
    return f"differs from eager by up to {worst:.3e}"


def is_close(expected: Tensor, result: Tensor) -> bool:
    """Whether a result is so close to eager's that no reference is needed; in little memory.

    Args:
        expected: Eager's result.
        result: Of the same dtype and shape.
    """
    if expected.layout != torch.strided:
        expected, result = expected.to_dense(), result.to_dense()
    return all(_is_close(e, r) for e, r in zip(_chunks(expected), _chunks(result), strict=True))


def _is_close(expected: Tensor, result: Tensor) -> bool:
    if not is_inexact(expected):
        return torch.equal(expected, result)
    if expected.dtype.itemsize < 2:  # no arithmetic is defined on them
        expected, result = expected.float(), result.float()
    return torch.allclose(expected, result, TOLERANCE, TOLERANCE, equal_nan=True)


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """Views of parts of a tensor, the same ones for all tensors of a shape."""
    if tensor.numel() <= _CHUNK:
        yield tensor
        return
    longest = max(range(tensor.dim()), key=lambda d: tensor.shape[d])
    size = max(1, tensor.shape[longest] * _CHUNK // tensor.numel())
    for part in tensor.split(size, longest):
        yield from _chunks(part) if part.shape[longest] == 1 else (part,)


def shape_difference(
    expected: Any, result: Any, promised: Collection[int] | None = None
) -> str | None:
    """What is wrong with the kind, dtype, shape, device or strides of a result; None: nothing.

    Args:
        expected: Eager's result.
        result: The one in question.
        promised: Strides that it may have instead of eager's.
    """
    if isinstance(expected, Tensor) != isinstance(result, Tensor):
        return f"is a {type(result).__name__} instead of a {type(expected).__name__}"
    if not isinstance(expected, Tensor):
        same = _are_equal(expected, result)
        return None if same else f"is {result!r} instead of {expected!r}"
    kinds = (expected.dtype, expected.shape, expected.device, expected.layout)
    if kinds != (result.dtype, result.shape, result.device, result.layout):
        return f"is {brief(result)} instead of {brief(expected)}"
    if expected.layout != torch.strided:
        return None
    if not _strides_agree(expected, result.stride(), expected.stride(), promised):
        return f"has strides {result.stride()} instead of {expected.stride()}"
    return None


def pattern_difference(expected: Any, result: Any) -> str:
    """What is different about the places of NaN and infinities; empty: nothing."""
    if not isinstance(expected, Tensor) or not is_inexact(expected):
        return ""
    if not isinstance(result, Tensor):
        return ""
    if not torch.equal(expected.isnan(), result.isnan()):
        return "has NaN where eager has not, or the reverse"
    if not torch.equal(expected.isinf(), result.isinf()):
        return "has infinities where eager has not, or the reverse"
    return ""


def relative_error(precise: Sequence[Any], results: Sequence[Any]) -> float:
    """Largest root mean square error of an output, relative to the output's root mean square."""
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


def aliases(args: Sequence[Any], results: Sequence[Any]) -> list[tuple[int, ...]]:
    """For each output: which inputs, and which outputs after them, share its memory."""
    everything = [*args, *results]
    places = [memory_of(x) if isinstance(x, Tensor) and x.numel() else None for x in everything]
    return [
        tuple(i for i, p in enumerate(places) if p is not None and p == place)
        for place in places[len(args) :]
    ]


def is_inexact(tensor: Tensor) -> bool:
    """Whether a tensor has floating-point or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


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


def brief(tensor: Tensor) -> str:
    """Dtype, shape and device: "float32[3, 4]"."""
    name = str(tensor.dtype).removeprefix("torch.")
    where = "" if tensor.device.type == "cpu" else f" on {tensor.device}"
    return f"{name}{list(tensor.shape)}{where}"

"""Samples of the operator database that hold NaN, infinities, signed zeros and bounds of integers.

Denormal numbers are not among them: that they are flushed to zero is a declared difference.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dynamo_backends.verify import describe_difference

_NAN, _INF = float("nan"), float("inf")

FLOATS: tuple[tuple[float, ...], ...] = (
    (_NAN,),
    (_INF, -_INF),
    (-0.0, 0.0),
    (_NAN, -_INF, 0.0, -0.0, _INF),
)
"""What is planted into each variant of a sample."""

_EACH = 5  # one in so many elements is replaced


def integers(dtype: torch.dtype, divides: bool = False) -> tuple[int, ...]:
    """Returns integers at and near a dtype's bounds, and some that no float represents.

    Args:
        dtype: The type.
        divides: Not the smallest: eager itself ends the process when that is divided by -1.
    """
    info = torch.iinfo(dtype)
    wide = (2**53 + 1, -(2**53) - 1, 2**31 + 5, 2**24 + 1, -(2**24) - 1, 0, -1, 7)
    near = (info.max, info.min + divides, info.max - 4, info.min + 1)
    return (*near, *(n for n in wide if info.min <= n <= info.max))


def variants(
    samples: Sequence[Any],
    accepted: Callable[[Any], bool],
    divides: bool = False,
    checks: bool = True,
) -> Iterator[Any]:
    """Yields each sample with each kind of extreme values in its tensors.

    Args:
        samples: From the database.
        accepted: Whether eager takes a sample. If it does not take extremes in all tensors of one,
            such as those that hold positions, they are put into its floats or its input only.
        divides: The operator divides (see `integers`).
        checks: Eager looks at positions before it uses them; else they stay as they are.
    """
    choices = (_all, _floats, _first) if checks else (_floats_and_first,)
    for sample in samples:
        turns = len(FLOATS) if _holds(sample, torch.is_floating_point) else 2
        for turn in range(turns):
            for chosen in choices:
                planted = _planted(sample, turn, chosen, divides)
                if accepted(planted):
                    yield planted
                    break


Choice = Callable[[int, Tensor], bool]


def _all(place: int, tensor: Tensor) -> bool:
    return True


def _floats(place: int, tensor: Tensor) -> bool:
    return tensor.is_floating_point()


def _first(place: int, tensor: Tensor) -> bool:
    return place == 0


def _floats_and_first(place: int, tensor: Tensor) -> bool:
    return _floats(place, tensor) or _first(place, tensor)


def _holds(sample: Any, wanted: Callable[[Tensor], bool]) -> bool:
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return any(isinstance(x, Tensor) and wanted(x) for x in leaves)


def _planted(sample: Any, turn: int, chosen: Choice, divides: bool) -> Any:
    flat, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    seen = 0
    for i, value in enumerate(flat):
        if isinstance(value, Tensor):
            if _is_plain(value) and chosen(seen, value):
                flat[i] = _with_extremes(value, turn, seen, divides)
            seen += 1
    found = copy.copy(sample)
    found.input, found.args, found.kwargs = pytree.tree_unflatten(flat, spec)
    return found


def _is_plain(tensor: Tensor) -> bool:
    number = not tensor.is_complex() and tensor.dtype != torch.bool and not tensor.is_quantized
    return number and tensor.layout is torch.strided and tensor.numel() > 0


def _with_extremes(tensor: Tensor, turn: int, place: int, divides: bool) -> Tensor:
    """A tensor of the same layout with some elements replaced, others in each turn and place."""
    known: Sequence[float] = (
        FLOATS[turn % len(FLOATS)]
        if tensor.is_floating_point()
        else integers(tensor.dtype, divides)
    )
    count = tensor.numel()
    line = tensor.clone(memory_format=torch.contiguous_format).view(-1)
    generator = torch.Generator().manual_seed(16 * turn + place)
    where = torch.randperm(count, generator=generator)[: -(-count // _EACH)]
    first = int(torch.randint(0, len(known), (1,), generator=generator))
    values = [known[(first + i) % len(known)] for i in range(len(where))]
    line[where] = torch.tensor(values, dtype=tensor.dtype)
    return torch.empty_like(tensor).copy_(line.view(tensor.shape))


def extreme_difference(
    expected: Sequence[Any],
    results: Sequence[Any],
    precise: Sequence[Any],
    signs: bool,
) -> str | None:
    """Returns what distinguishes results from eager's; judges infinities and NaN one by one.

    Where eager and its float64 reference are of different kinds (a number, NaN, an infinity), both
    are right; so with the sign of a zero. A number is right within a unit in its last place of the
    reference: where most of a tensor is no number, eager's own rounding of the rest may be lucky.

    Args:
        expected: Eager's results.
        results: The results in question.
        precise: The same in float64.
        signs: Whether zeros have signs.
    """
    if len(expected) != len(results):
        return describe_difference(expected, results, precise)
    compared = [
        _comparable(*three, signs) for three in zip(expected, results, precise, strict=True)
    ]
    for i, (_, _, _, wrong) in enumerate(compared):
        if wrong is not None:
            return f"output {i} {wrong}"
    eagers, found, wide = ([three[k] for three in compared] for k in range(3))
    return describe_difference(eagers, found, wide)


def _comparable(e: Any, r: Any, p: Any, signs: bool) -> tuple[Any, Any, Any, str | None]:
    """Three results with 0 in the place of what is no number, and what is wrong about that."""
    floats = isinstance(e, Tensor) and isinstance(r, Tensor) and e.is_floating_point()
    if not floats or e.dtype != r.dtype or e.shape != r.shape or p.shape != e.shape:
        return e, r, p, None
    narrow = p.to(e.dtype)
    kinds = [_kind(x) for x in (e, r, narrow)]
    wrong = (kinds[1] != kinds[0]) & (kinds[1] != kinds[2])
    settled = (kinds[0] == 0) & (kinds[1] == 0) & (kinds[2] == 0)
    close = (r.to(p.dtype) - p).abs() <= torch.finfo(e.dtype).eps * p.abs()
    e0, r0, p0 = (torch.where(settled, x, 0) for x in (e, torch.where(close, e, r), p))
    if wrong.any():
        text = f"is {_names(kinds[1][wrong])} where eager is {_names(kinds[0][wrong])}"
        return e0, r0, p0, text
    zeros = settled & (e == 0) & (r == 0) & (e.signbit() == narrow.signbit())
    if signs and (zeros & (e.signbit() != r.signbit())).any():
        return e0, r0, p0, "has zeros of the other sign"
    return e0, r0, p0, None


_KINDS = ("a number", "NaN", "inf", "-inf")


def _kind(x: Tensor) -> Tensor:
    kind = x.isnan().to(torch.int8)
    return kind + 2 * x.isposinf().to(torch.int8) + 3 * x.isneginf().to(torch.int8)


def _names(kinds: Tensor) -> str:
    return " or ".join(_KINDS[int(k)] for k in kinds.unique())

"""Inputs for trials: what implementations of an operator tend to differ on."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

_FLOATS = (0.0, -0.0, 0.5, 1.5, 2.5, -0.5, -1.5, 3.0, -3.0, 1e4, -1e4, 7.3, -7.3)
_SPECIAL = (float("nan"), float("inf"), -float("inf"))
_ENOUGH = len(_FLOATS) + len(_SPECIAL)

# Reductions whose results show how NaN is treated.
_ORDERED = {"amax", "amin", "max", "min", "argmax", "argmin", "aminmax", "cummax", "cummin"}


def turns(values: Sequence[Tensor]) -> int:
    """How many samples of (fake) inputs are needed to show everything that a sample can hold."""
    largest = max((v.numel() for v in values), default=_ENOUGH)
    return 1 if largest == 0 or largest >= _ENOUGH else math.ceil(_ENOUGH / largest)


def sample(op: Any, values: Sequence[Tensor], turn: int = 0) -> list[Tensor]:
    """One tensor per (fake) input of a call, the same ones for each call of the same kind.

    Operators that work element by element get integers of both signs, halves, infinities and NaN;
    others get numbers that are also valid as indices and as parts of a mask.

    Args:
        op: The operator.
        values: Fake inputs.
        turn: Which of the samples (see `turns`).
    """
    generator = torch.Generator().manual_seed(turn)
    name = str(op).split(".")[1] if "." in str(op) else str(op)
    if torch.Tag.pointwise in getattr(op, "tags", ()):
        floats, integers = _pointwise_floats, _signed_integers
    elif name in _ORDERED:
        floats, integers = _floats_with_nan, _indices
    else:
        floats, integers = _floats, _indices
    return [_tensor(v, floats, integers, turn, generator) for v in values]


Line = Callable[[int, int, torch.Generator], Tensor]


def _tensor(
    fake: Tensor, floats: Line, integers: Line, turn: int, generator: torch.Generator
) -> Tensor:
    count = fake.numel()
    if fake.dtype == torch.bool:
        line = _indices(count, turn, generator)
    elif fake.dtype.is_floating_point:
        line = floats(count, turn, generator)
    else:
        line = integers(count, turn, generator)
        line = line if fake.dtype.is_signed else line.abs()
    dense = line.to(fake.device, fake.dtype).view(fake.shape)
    if 0 in fake.stride():
        return dense
    strided = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
    return strided.copy_(dense)


def _pointwise_floats(count: int, turn: int, generator: torch.Generator) -> Tensor:
    line = torch.randn(count, generator=generator)
    known = torch.tensor([*_FLOATS, *_SPECIAL])
    if count < _ENOUGH:
        start = turn * count
        return torch.cat([known, known])[start : start + count]
    places = torch.randperm(count, generator=generator)[: len(known)]
    line[places] = known
    return line


def _floats_with_nan(count: int, turn: int, generator: torch.Generator) -> Tensor:
    line = torch.randn(count, generator=generator)
    if turn % 2 == 0 and count > 2:
        line[count // 2] = float("nan")
    return line


def _floats(count: int, turn: int, generator: torch.Generator) -> Tensor:
    return torch.randn(count, generator=generator)


def _signed_integers(count: int, turn: int, generator: torch.Generator) -> Tensor:
    sign = torch.randint(0, 2, (count,), generator=generator) * 2 - 1
    return torch.randint(1, 8, (count,), generator=generator) * sign


def _indices(count: int, turn: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (count,), generator=generator)


# Arguments whose values are positions or sizes; anything else may hold any number.
_POSITIONS = {"index", "indices", "offsets", "target", "repeats", "boundaries"}
_COUNTS = {"one_hot", "bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__"}


def spread_extremes(node: fx.Node, tensors: Sequence[Tensor]) -> None:
    """Puts the largest and smallest integers of their type into a call's sample, in place.

    So arithmetic that is done in another width shows, and what is only moved must arrive whole.
    Tensors that hold positions or sizes are left as they are.

    Args:
        node: The call.
        tensors: One per node that it reads.
    """
    positions = _positions(node)
    for source, tensor in zip(node.all_input_nodes, tensors, strict=True):
        if source not in positions and _is_integer(tensor.dtype) and 0 not in tensor.stride():
            _write_extremes(tensor)


def _positions(node: fx.Node) -> set[fx.Node]:
    """The tensors among a call's arguments that hold positions or sizes."""
    target: Any = node.target
    if target._schema.name.partition("::")[2] in _COUNTS:
        return set(node.all_input_nodes)
    found: set[fx.Node] = set()
    arguments = target._schema.arguments
    named = {a.name: v for a, v in zip(arguments, node.args, strict=False)} | node.kwargs
    for name, value in named.items():
        if name in _POSITIONS:
            fx.map_arg(value, found.add)
    return found


def _is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool


def _write_extremes(tensor: Tensor) -> None:
    info = torch.iinfo(tensor.dtype)
    known: Sequence[int] = (info.max, info.min + 1, info.max // 3, info.min // 5 + 1)
    count = min(len(known), tensor.numel())
    places = torch.linspace(0, tensor.numel() - 1, count).long()
    for place, number in zip(places.tolist(), known, strict=False):
        tensor[_index(tensor, place)] = number


def _index(tensor: Tensor, place: int) -> tuple[int, ...]:
    """The position of an element by its number in row-major order."""
    position = []
    for size in reversed(tensor.shape):
        place, at = divmod(place, size)
        position.append(at)
    return tuple(reversed(position))

"""Operators in eager that draw random numbers on a device, as graphs do (`graph.seeded_draws`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.graph.random_draws import draw, seed_draw_arguments
from dynamo_backends.graph.seeded_draws import complete_draw_request

aten = torch.ops.aten

_LAYOUT = ("dtype", "memory_format", "device", "layout", "pin_memory")


@dataclass(frozen=True)
class _Kind:
    """The distribution that an operator draws from.

    Attributes:
        method: That draws from the same distribution.
        arguments: Arguments of the method, from those of the operator.
        writes: It writes over its first argument.
    """

    method: str
    arguments: Callable[[Sequence[Any]], Sequence[Any]]
    writes: bool


def _rest(args: Sequence[Any]) -> Sequence[Any]:
    return args[1:]


def _below(args: Sequence[Any]) -> Sequence[Any]:
    return 0, *args[1:]


_KINDS: Mapping[OpOverload, _Kind] = {
    aten.bernoulli_.float: _Kind("bernoulli_", _rest, True),
    aten.uniform_.default: _Kind("uniform_", _rest, True),
    aten.normal_.default: _Kind("normal_", _rest, True),
    aten.exponential_.default: _Kind("exponential_", _rest, True),
    getattr(aten.random_, "from"): _Kind("random_", _rest, True),
    aten.random_.to: _Kind("random_", _below, True),
    aten.bernoulli.p: _Kind("bernoulli_", _rest, False),
    aten.rand_like.default: _Kind("uniform_", _rest, False),
    aten.randn_like.default: _Kind("normal_", _rest, False),
    aten.randint_like.default: _Kind("random_", _below, False),
    aten.randint_like.low_dtype: _Kind("random_", _rest, False),
}


@dataclass(frozen=True)
class SingleDraw:
    """Holds the arguments of one random operator with its seed.

    Attributes:
        given: The arguments of `SEEDED_DRAW`, with a seed that torch's generator gave.
        target: What the call writes to; None: it returns a new tensor.
    """

    given: tuple[Any, ...]
    target: Tensor | None


def single_draw(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> SingleDraw | None:
    """Converts a random operator to a seeded draw on the device; None: run on the host.

    Args:
        func: The overload.
        args: Its arguments, with handles in the place of tensors.
        kwargs: Likewise.
    """
    kind = _KINDS.get(func)
    if kind is None or kwargs.get("generator") is not None:
        return None
    named = {k: v for k, v in kwargs.items() if k not in (*_LAYOUT, "generator")}
    positional = [a.name for a in func._schema.arguments][len(args) :]
    complete_args = [*args, *(named.pop(n) for n in positional if n in named)]
    like = args[0]
    if not kind.writes:
        layout = {k: v for k, v in kwargs.items() if k in _LAYOUT}
        like = torch.empty_like(like, **layout)
    request = complete_draw_request(kind.method, like.dtype, list(kind.arguments(complete_args)))
    if request is None or named or like.device.type != "cpu":
        return None
    dense = torch.empty_like(like).stride()
    method, arguments = request
    seeds = draw(*seed_draw_arguments(1))
    where = list(like.shape), list(dense), like.dtype
    given = seeds, 0, method, *where, [*map(float, arguments)]
    return SingleDraw(given, args[0] if kind.writes else None)

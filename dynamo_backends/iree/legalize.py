"""Calls that are handed to IREE in other words, because its own lowering of them is inexact.

Measured in float32 with IREE 3.13: `erf` and `tanh` stay 6e-8 short of 1, which `gelu` multiplies
by its argument; `gelu` with "tanh" is off by 5e-5; `sin` and `cos` lose their digits from 1e3 on,
and `sin` is off by 1e-7 next to 0; `log10` is not linked.
`erf` and `trunc` drop the sign of zero, `clamp` turns NaN into a bound, `eq` holds for it, and
`maximum` and `minimum` of single numbers, such as sums, lose it where they are fused with others.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends.graph.decompose import replace

aten = torch.ops.aten

# From here on erf and tanh are 1 in float32.
_ERF_SATURATES = 3.95
_TANH_SATURATES = 9.1

_SINE_IS_CUBIC = 0.02

# 2π in parts of few bits, so that products with integers up to 2**13 are exact.
_TWO_PI = (6.28125, 0.0019350051879882812, 3.0199159795074593e-07)
_BEYOND_A_TURN = 4.0  # no digit of a number is left that is brought to more than π


def _saturated(function: Callable[[Tensor], Tensor], x: Tensor, bound: float) -> Tensor:
    return torch.where(x.abs() > bound, x.sign(), function(x))


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
        factor = _saturated(torch.tanh, inner, _TANH_SATURATES)
    else:
        factor = _saturated(torch.erf, wide * math.sqrt(0.5), _ERF_SATURATES)
    return (wide * 0.5 * (1 + factor)).to(x.dtype)


def _reduced(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function of period 2π, of its argument brought to -π to π."""

    def spelled(x: Tensor) -> Tensor:
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        turns = torch.floor(wide * (0.5 / math.pi) + 0.5)
        for part in _TWO_PI:
            wide = wide - turns * part
        wide = torch.where(wide.abs() > _BEYOND_A_TURN, torch.zeros_like(wide), wide)
        return function(wide).to(x.dtype)

    return spelled


def _sin(x: Tensor) -> Tensor:
    """The sine of -π to π."""
    cubic = x * (1 - x * x / 6)  # 0 keeps its sign
    return torch.where(x.abs() < _SINE_IS_CUBIC, cubic, torch.sin(x))


def _erf(x: Tensor) -> Tensor:
    return torch.where(x == 0, x, torch.erf(x))


def _trunc(x: Tensor) -> Tensor:
    return torch.where(x < 0, x.ceil(), x.floor())


def _clamp(x: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    for bound, beyond in ((min, torch.lt), (max, torch.gt)):
        if bound is not None:
            x = torch.where(beyond(x, bound), torch.full((), bound, dtype=x.dtype), x)
    return x


def _maximum(x: Tensor, y: Tensor) -> Tensor:
    return torch.where((x > y) | (x != x), x, y)


def _minimum(x: Tensor, y: Tensor) -> Tensor:
    return torch.where((x < y) | (x != x), x, y)


def _log10(x: Tensor) -> Tensor:
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    return (torch.log(wide) * math.log10(math.e)).to(x.dtype)


def _eq(x: Tensor, y: Any) -> Tensor:
    return ~(x != y)


_SPELLINGS: dict[Any, Callable[..., Tensor]] = {
    aten.clamp.default: _clamp,
    aten.cos.default: _reduced(torch.cos),
    aten.eq.Scalar: _eq,
    aten.eq.Tensor: _eq,
    aten.erf.default: _erf,
    aten.gelu.default: _gelu,
    aten.log10.default: _log10,
    aten.maximum.default: _maximum,
    aten.minimum.default: _minimum,
    aten.sin.default: _reduced(_sin),
    aten.trunc.default: _trunc,
}

_FOR_FLOAT32 = frozenset(
    {aten.cos.default, aten.gelu.default, aten.log10.default, aten.sin.default}
)
"""Those whose numbers are those of float32; what is narrower is computed in it."""


def spell(graph: fx.Graph) -> None:
    """Rewrites such calls on floating-point numbers, in place."""
    for node in list(graph.nodes):
        spelling = _SPELLINGS.get(node.target)
        if spelling is not None and _is_spelled(node):
            replace(node, spelling)


def _is_spelled(node: fx.Node) -> bool:
    dtypes = [n.meta["val"].dtype for n in node.all_input_nodes]
    if node.target in _FOR_FLOAT32 and torch.float64 in dtypes:
        return False
    return all(dtype.is_floating_point for dtype in dtypes)

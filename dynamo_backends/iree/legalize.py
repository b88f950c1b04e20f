"""Calls that are handed to IREE in other words, because its own lowering is inexact or absent.

Measured in float32 with IREE 3.13: `erf` and `tanh` stay 6e-8 short of 1, which `gelu` multiplies
by its argument; `gelu` with "tanh" is off by 5e-5; `sin` and `cos` lose their digits from 1e3 on,
and `sin` is off by 1e-7 next to 0; `log10` is not linked; `pow` loses digits of large powers.
Hyperbolic functions and their inverses lose their digits for small numbers and overflow too early;
squares in norms of one number overflow; a product before `softmax` is computed once more, with
another rounding, where the maximum is subtracted from it, so that differences may be positive.
`erf` and `trunc` drop the sign of zero, `clamp` turns NaN into a bound, `eq` holds for it, and
`maximum` and `minimum` of single numbers, such as sums, lose it where they are fused with others.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends.graph.call_decomposition import replace_call
from dynamo_backends.interface.errors import LoweringError
from dynamo_backends.iree import formulas, trigonometry
from dynamo_backends.iree.formulas import DIVISIONS, OF_BYTES, OF_INTEGERS

aten = torch.ops.aten

# From here on erf and tanh are 1 in float32.
_ERF_SATURATES = 3.95
_TANH_SATURATES = 9.1


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


def _eq(x: Tensor, y: Tensor) -> Tensor:
    return ~(x != y)


def _with_number(compare: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A comparison with a number of the tensor's dtype, as in eager; IREE's is in float64."""
    return lambda x, number: compare(x, torch.full((), number, dtype=x.dtype))


def _silu(x: Tensor) -> Tensor:
    wide = x.float() if x.dtype in _NARROW else x
    root = torch.exp(wide * -0.5)  # IREE's exponential is infinite from 88.4 on
    return (wide / (1 + root * root)).to(x.dtype)


def _elu(x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    wide = x.float() if x.dtype in _NARROW else x
    below = torch.expm1(wide * input_scale) * (alpha * scale)
    return torch.where(wide > 0, wide * scale, below).to(x.dtype)


_NARROW = (torch.bfloat16, torch.float16)
_EXP_IS_ALL = 20.0  # from here on exp(-x) is no part of sinh(x)
_SQUARE_IS_ALL = 1e10
_LOG_2 = math.log(2)


def _of_magnitude(function: Callable[[Tensor], Tensor], odd: bool) -> Callable[[Tensor], Tensor]:
    """An odd or even function, of its values for positive arguments; computed in float32."""

    def spelled(x: Tensor) -> Tensor:
        wide = x.float() if x.dtype in _NARROW else x
        result = function(wide.abs())
        if odd:
            result = torch.where(wide > 0, result, torch.where(wide < 0, -result, wide))
        return result.to(x.dtype)

    return spelled


def _half_exp(x: Tensor) -> Tensor:
    """exp(x) / 2, also where exp(x) is infinite."""
    root = torch.exp(x * 0.5)
    return root * 0.5 * root


def _sinh(x: Tensor) -> Tensor:
    e = torch.expm1(x)
    return torch.where(x > _EXP_IS_ALL, _half_exp(x), 0.5 * (e + e / (e + 1)))


def _cosh(x: Tensor) -> Tensor:
    e = torch.exp(x)
    return torch.where(x > _EXP_IS_ALL, _half_exp(x), 0.5 * (e + 1 / e))


def _asinh(x: Tensor) -> Tensor:
    square = x * x
    small = torch.log1p(x + square / (1 + torch.sqrt(square + 1)))
    return torch.where(x > _SQUARE_IS_ALL, torch.log(x) + _LOG_2, small)


def _acosh(x: Tensor) -> Tensor:
    wide = x.float() if x.dtype in _NARROW else x
    beyond = wide - 1
    small = torch.log1p(beyond + torch.sqrt(beyond * beyond + 2 * beyond))
    result = torch.where(wide > _SQUARE_IS_ALL, torch.log(wide) + _LOG_2, small)
    return torch.where(wide < 1, torch.full((), math.nan), result).to(x.dtype)


def _atanh(x: Tensor) -> Tensor:
    return 0.5 * torch.log1p(2 * x / (1 - x))


_ERFC = (
    -1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806, 0.27886807, -1.13520398,
    1.48851587, -0.82215223, 0.17087277,
)  # fmt: skip
"""Press et al., Numerical Recipes, "erfcc": relative error 1.2e-7 everywhere."""


def _erfc(x: Tensor) -> Tensor:
    wide = x.float() if x.dtype in _NARROW else x
    far = wide.abs()
    t = 1 / (1 + 0.5 * far)
    series = torch.full((), _ERFC[-1])
    for factor in reversed(_ERFC[:-1]):
        series = series * t + factor
    tail = t * torch.exp(series - wide * wide)
    return torch.where(wide < 0, 2 - tail, tail).to(x.dtype)


def _pow(x: Tensor, exponent: float) -> Tensor:
    """Computes powers as eager's kernels do, of which those of float16 have no roots."""
    if x.dtype == torch.float16:
        return torch.pow(x, exponent)
    if exponent == 0.5:
        return torch.sqrt(x)
    if exponent == -0.5:
        return 1 / torch.sqrt(x)
    if exponent in (-1, -2):
        return 1 / (x if exponent == -1 else x * x)
    return torch.pow(x, exponent)


def _norm(
    x: Tensor, order: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    dims = list(range(x.ndim)) if dim is None else dim
    if order == 2 and dtype is None and all(x.shape[d] == 1 for d in dims):
        return x.abs().sum(dims, keepdim)  # whose square may be beyond float32
    return torch.linalg.vector_norm(x, order, dim, keepdim, dtype=dtype)


def _below_maximum(x: Tensor, dim: list[int]) -> tuple[Tensor, Tensor]:
    """Differences from the maximum, none of them positive, and the maximum."""
    most = x.amax(dim, True)
    difference = x - most
    # Of rows of infinities the differences are NaN, as eager's are.
    return torch.where(difference > 0, torch.zeros_like(x), difference), most


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    wide = x.float() if x.dtype in _NARROW else x
    powers = torch.exp(_below_maximum(wide, [dim])[0])
    return (powers / powers.sum(dim, True)).to(torch.float32 if half_to_float else x.dtype)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    wide = x.float() if x.dtype in _NARROW else x
    below = _below_maximum(wide, [dim])[0]
    result = below - torch.log(torch.exp(below).sum(dim, True))
    return result.to(torch.float32 if half_to_float else x.dtype)


def _logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    wide = x.float() if x.dtype in _NARROW else x
    dims = [dim] if isinstance(dim, int) else list(dim)
    below, most = _below_maximum(wide, dims)
    infinite = (most == math.inf) | (most == -math.inf)
    result = torch.where(infinite, most, torch.log(torch.exp(below).sum(dims, True)) + most)
    return (result if keepdim else result.squeeze(dims)).to(x.dtype)


def _position(extremum: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns the position of the extremum, or of the first NaN."""

    def spelled(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        nan = x != x
        if dim is None:
            any_nan = nan.any()
            first = nan.to(torch.int32).reshape(-1).argmax(0)
            found = extremum(x.reshape(-1), 0)
            return torch.where(any_nan, first, found)
        first = nan.to(torch.int32).argmax(dim, keepdim)
        return torch.where(nan.any(dim, keepdim), first, extremum(x, dim, keepdim))

    return spelled


_SPELLINGS: dict[Any, Callable[..., Any]] = {
    aten._log_softmax.default: _log_softmax,
    aten._softmax.default: _softmax,
    aten.acosh.default: _acosh,
    aten.argmax.default: _position(torch.argmax),
    aten.argmin.default: _position(torch.argmin),
    aten.asinh.default: _of_magnitude(_asinh, odd=True),
    aten.atan2.default: formulas.atan2,
    aten.atanh.default: _of_magnitude(_atanh, odd=True),
    aten.clamp.default: _clamp,
    aten.copysign.Tensor: formulas.copysign,
    aten.cosh.default: _of_magnitude(_cosh, odd=False),
    aten.cos.default: trigonometry.cos,
    aten.eq.Scalar: _with_number(_eq),
    aten.eq.Tensor: _eq,
    aten.elu.default: _elu,
    aten.erf.default: _erf,
    aten.erfc.default: _erfc,
    aten.erfinv.default: formulas.erfinv,
    aten.fmod.Tensor: formulas.fmod,
    aten.ge.Scalar: _with_number(torch.ge),
    aten.gelu.default: _gelu,
    aten.gt.Scalar: _with_number(torch.gt),
    aten.hardtanh.default: lambda x, low=-1, high=1: _clamp(x, low, high),
    aten.hypot.default: formulas.hypot,
    aten.le.Scalar: _with_number(torch.le),
    aten.linalg_vector_norm.default: _norm,
    aten.log10.default: _log10,
    aten.logcumsumexp.default: formulas.logcumsumexp,
    aten.logsumexp.default: _logsumexp,
    aten.lt.Scalar: _with_number(torch.lt),
    aten.maximum.default: _maximum,
    aten.minimum.default: _minimum,
    aten.ne.Scalar: _with_number(torch.ne),
    aten.pow.Tensor_Scalar: _pow,
    aten.pow.Tensor_Tensor: formulas.pow,
    aten.signbit.default: formulas.signbit,
    aten.silu.default: _silu,
    aten.sin.default: trigonometry.sin,
    aten.sinh.default: _of_magnitude(_sinh, odd=True),
    aten.sort.default: formulas.sort,
    aten.tan.default: trigonometry.tan,
    aten.topk.default: formulas.topk,
    aten.trunc.default: _trunc,
}

FOR_FLOAT32 = frozenset(
    {
        aten.acosh.default, aten.asinh.default, aten.atan2.default, aten.atanh.default,
        aten.cos.default, aten.cosh.default, aten.erfc.default, aten.erfinv.default,
        aten.gelu.default, aten.hypot.default, aten.log10.default, aten.logcumsumexp.default,
        aten.pow.Tensor_Tensor, aten.sin.default, aten.sinh.default, aten.tan.default,
    }
)  # fmt: skip
"""Those whose numbers are those of float32; what is narrower is computed in it."""


def legalize_calls(graph: fx.Graph) -> None:
    """Rewrites calls that IREE lowers inexactly or not at all, in place.

    Raises:
        LoweringError: The formula of a call needs a size, which varies.
    """
    for node in list(graph.nodes):
        if node.target in DIVISIONS:
            _take_number(node)
        elif node.target is aten.constant_pad_nd.default:
            _round_value(node)
    for node in list(graph.nodes):
        spelling = _spelling(node)
        if spelling is None:
            continue
        if len(_tensors(node)) < len(node.all_input_nodes):
            raise LoweringError(
                node.name, str(node.target), "its lowering needs a size as a tensor value"
            )
        replace_call(node, spelling)


def _take_number(node: fx.Node) -> None:
    """Gives a division of integers its divisor, which type promotion has made a tensor of."""
    divisor: Any = node.args[1]
    if not isinstance(divisor, fx.Node) or divisor.target is not aten.scalar_tensor.default:
        return
    if isinstance(divisor.args[0], int) and not node.meta["val"].is_floating_point():
        node.update_arg(1, divisor.args[0])
        if not divisor.users:
            node.graph.erase_node(divisor)


def _round_value(node: fx.Node) -> None:
    """Makes the value of a padding a number of the dtype."""
    value: Any = node.args[2] if len(node.args) > 2 else 0
    if node.meta["val"].is_floating_point():
        rounded = torch.tensor(value, dtype=node.meta["val"].dtype).item()
        node.args = (*node.args[:2], rounded)


def _spelling(node: fx.Node) -> Callable[..., Any] | None:
    target: Any = node.target
    if target is aten._to_copy.default:
        is_rounded = node.meta["val"].dtype == torch.bfloat16
        return formulas.to_copy if is_rounded and not _is_of(node, torch.bfloat16) else None
    if target in OF_BYTES:
        return OF_BYTES[target] if node.meta["val"].dtype == torch.uint8 else None
    if target not in _SPELLINGS and target not in OF_INTEGERS:
        return None
    dtypes = [x.dtype for x in _tensors(node)]
    if not any(dtype.is_floating_point or dtype == torch.bool for dtype in dtypes):
        by_tensor = target in DIVISIONS and not isinstance(node.args[1], int)
        return None if by_tensor else OF_INTEGERS.get(target)
    if target in FOR_FLOAT32 and torch.float64 in dtypes:
        return None
    return _SPELLINGS.get(target) if all(d.is_floating_point for d in dtypes) else None


def _is_of(node: fx.Node, dtype: torch.dtype) -> bool:
    return all(x.dtype == dtype for x in _tensors(node))


def _tensors(node: fx.Node) -> list[Tensor]:
    values = [n.meta["val"] for n in node.all_input_nodes]
    return [x for x in values if isinstance(x, Tensor)]  # others are sizes

"""Calls that OpenVINO's frontend converts wrongly or not at all, in other operators of ATen.

The rows of `REWRITES` are functions of a call's arguments. Each one is exact where the frontend's
own rule, or the kernel behind it, is not.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.graph.call_decomposition import replace_call
from dynamo_backends.graph.call_tracing import CallTraceCache
from dynamo_backends.graph.symbolic_sizes import (
    SizeWithExpression,
    has_size_expressions,
    is_symbolic,
    sizes_of,
)
from dynamo_backends.openvino.int64_pairs import divide_int32, remainder_int32

aten = torch.ops.aten


def rewrite_unsupported_calls(nodes: Iterable[fx.Node]) -> None:
    """Rewrites calls that OpenVINO's frontend converts wrongly, in place."""
    traces = CallTraceCache()
    for node in list(nodes):
        target: Any = node.target
        rewrite = REWRITES.get(target)
        if rewrite is not None and _applies(node):
            replace_call(node, rewrite, _INSIDE, traces)


def _applies(node: fx.Node) -> bool:
    args: Any = node.args
    if node.target in _INTEGER_DIVISIONS:
        by = args[1]
        if isinstance(by, fx.Node) and by.target is aten.scalar_tensor.default:
            node.update_arg(1, by.args[0])  # which type promotion has made of a number
        return not node.meta["val"].is_floating_point() and isinstance(node.args[1], int)
    if node.target is aten._to_copy.default:
        return bool(node.meta["val"].dtype == torch.bool)
    if node.target is aten.linalg_vector_norm.default:
        return bool(node.meta["val"].numel() == args[0].meta["val"].numel())
    if node.target is aten.index.Tensor:
        return sum(x is not None for x in args[1]) > 1
    if node.target is aten.split.Tensor:
        length = sizes_of(args[0])[args[2] if len(args) > 2 else 0]
        return (
            has_size_expressions(node.graph)
            and length is not None
            and not isinstance(length, SizeWithExpression)
        )
    return True


_INTEGER_DIVISIONS = (
    aten.div.Tensor_mode, aten.fmod.Scalar, aten.fmod.Tensor, aten.remainder.Scalar,
    aten.remainder.Tensor,
)  # fmt: skip


def _log1p(x: Tensor) -> Tensor:
    """Computes log1p with log, corrected for the rounding of 1 + x (Goldberg, 1991)."""
    u = x + 1
    gained = u - 1
    result = torch.where(gained == 0, x, u.log() * (x / gained))
    return torch.where(u == math.inf, u, result)


def _expm1(x: Tensor) -> Tensor:
    t = (x * 0.5).tanh()
    return torch.where(x.abs() < 0.5, 2 * t / (1 - t), x.exp() - 1)


def _celu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return torch.where(x > 0, x, alpha * _expm1(x / alpha))


_ERFC = (-1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806, 0.27886807, -1.13520398,
         1.48851587, -0.82215223, 0.17087277)  # fmt: skip
"""Coefficients of the function `erfcc` of Numerical Recipes, 6.2: relative error below 1.2e-7."""


def _erfc(x: Tensor) -> Tensor:
    z = x.abs()
    t = 1 / (1 + 0.5 * z)
    tail = t * (_polynomial(_ERFC[::-1], t) - z * z).exp()
    result = torch.where(x < 0, 2 - tail, tail)
    return torch.where(z < 0.5, 1 - x.erf(), result)


def _log_sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.clamp_max(0) - _log1p((-x.abs()).exp()), x.new_empty(0)


def _sign_bit(x: Tensor) -> Tensor:
    return (x < 0) | ((x == 0) & (1 / x < 0))


def _copysign(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(_sign_bit(y), -x.abs(), x.abs())


def _hypot(x: Tensor, y: Tensor) -> Tensor:
    x, y = x.abs(), y.abs()
    larger, smaller = torch.where(x > y, x, y), torch.where(x > y, y, x)
    quotient = smaller / larger.masked_fill(larger == 0, 1.0)
    result = larger * (1 + quotient * quotient).sqrt()
    return torch.where((x == math.inf) | (y == math.inf), math.inf * torch.ones_like(x), result)


def _atan2(y: Tensor, x: Tensor) -> Tensor:
    """Computes atan2 from the arc tangent of a ratio up to 1, by octants."""
    height, width = y.abs(), x.abs()
    larger, smaller = torch.maximum(height, width), torch.minimum(height, width)
    quotient = smaller / larger.masked_fill(larger == 0, 1.0)
    angle = quotient.masked_fill(smaller == math.inf, 1.0).atan()
    angle = torch.where(height > width, math.pi / 2 - angle, angle)
    return _copysign(torch.where(_sign_bit(x), math.pi - angle, angle), y)


def _log_add_exp(x: Tensor, y: Tensor) -> Tensor:
    larger, smaller = torch.maximum(x, y), torch.minimum(x, y)
    return larger + _log1p((smaller - larger).masked_fill(smaller == larger, 0.0).exp())


def _log_cumsum_exp(x: Tensor, dim: int) -> Tensor:
    """Computes logcumsumexp by recursive doubling (Hillis and Steele, 1986)."""
    if not x.ndim:
        return x.clone()
    size = x.shape[dim]
    for step in itertools.takewhile(lambda n: n < size, (1 << i for i in itertools.count())):
        before = torch.full_like(x.narrow(dim, 0, step), -math.inf)
        x = _log_add_exp(x, torch.cat([before, x.narrow(dim, 0, size - step)], dim))
    return x


def _divided(x: Tensor, by: int, *, rounding_mode: str) -> Tensor:
    return divide_int32(x.to(torch.int32), _in_dtype(by, x), rounding_mode).to(x.dtype)


def _rest(rounding_mode: str) -> Callable[..., Tensor]:
    def rewrite(x: Tensor, by: int) -> Tensor:
        rest = remainder_int32(x.to(torch.int32), _in_dtype(by, x), rounding_mode)
        return rest.to(x.dtype)

    return rewrite


def _in_dtype(number: int, x: Tensor) -> int:
    """Wraps a number to an integer dtype's range, as eager does."""
    info = torch.iinfo(x.dtype)
    return (number - info.min) % (1 << info.bits) + info.min


def _is_nan(x: Tensor) -> Tensor:
    return x != x


def _arg_extreme(find: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Makes an argmax or argmin that returns the first extreme, or the first NaN."""

    def rewrite(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        if not x.ndim:
            raise NotImplementedError
        if dim is None:
            kept = keepdim and [1] * x.ndim
            found = rewrite(x.reshape(-1), 0)
            return found.reshape(kept) if kept else found
        dim %= x.ndim
        size = x.shape[dim]
        # Floating point is faster, and exact up to 2^24.
        is_short = isinstance(size, int) and size <= 1 << 24
        dtype, beyond = (torch.float32, 2.0**24) if is_short else (torch.int32, 2**31 - 1)
        places = torch.arange(size, dtype=dtype, device=x.device)
        places = places.view([-1 if d == dim else 1 for d in range(x.ndim)])
        hit = x == find(x, dim, True)
        if x.is_floating_point():
            hit = hit | _is_nan(x)
        elsewhere = places.expand(x.shape).masked_fill(~hit, beyond)
        return elsewhere.amin(dim, keepdim).to(torch.int64)

    return rewrite


def _with_position(find: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    position = _arg_extreme(find)
    return lambda x, dim, keepdim=False: (find(x, dim, keepdim), position(x, dim, keepdim))


def _key(x: Tensor) -> Tensor:
    """Returns sort keys that put NaN last, as torch does."""
    if not x.is_floating_point():
        return x
    return x.clamp_max(torch.finfo(x.dtype).max).masked_fill(_is_nan(x), math.inf)


def _sort(x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    _, places = aten.sort.default(_key(x), dim, descending)
    return x.gather(dim, places), places


def _topk(
    x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    _, places = aten.topk.default(_key(x), k, dim, largest, sorted)
    return x.gather(dim, places), places


def _std(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    """Computes std on values scaled to size 1, so that squares do not overflow."""
    largest = x.abs().amax(dim if dim else list(range(x.ndim)), keepdim=True)
    largest = largest.masked_fill(largest == 0, 1.0)
    result = torch.std(x / largest, dim, correction=correction, keepdim=True) * largest
    return result if keepdim else result.squeeze(dim if dim else list(range(x.ndim)))


def _norm_of_one(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Returns the norm of single elements, their absolute value, without squaring."""
    result = torch.linalg.vector_norm(x, *args, **kwargs)
    return x.abs().view(result.shape)


def _erfinv(x: Tensor) -> Tensor:
    """Computes erfinv by Giles's approximation (2010), in float32."""
    w = -((1 - x) * (1 + x)).log()
    near, far = w - 2.5, w.sqrt() - 3
    result = torch.where(w < 5, _polynomial(_ERFINV_NEAR, near), _polynomial(_ERFINV_FAR, far)) * x
    return torch.where(x.abs() == 1, x * math.inf, result)


_ERFINV_NEAR = (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087,
                -0.00125372503, -0.00417768164, 0.246640727, 1.50140941)  # fmt: skip
_ERFINV_FAR = (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773,
               -0.0076224613, 0.00943887047, 1.00167406, 2.83297682)  # fmt: skip


def _polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    """Evaluates a polynomial by Horner's rule; the highest coefficient comes first."""
    result = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result = result * x + coefficient
    return result


def _shift(operator: Any, to_left: bool) -> Callable[..., Tensor]:
    """Makes a shift that is defined for counts beyond the width, as eager's is."""

    def rewrite(x: Tensor, count: Tensor | int) -> Tensor:
        bits = torch.iinfo(x.dtype).bits
        wide = x.to(torch.int32)
        if isinstance(count, int):
            is_inside = 0 <= count < bits
            # torch traces no shift that broadcasts to symbolic sizes.
            if is_inside and not is_symbolic(wide):
                return operator(wide, wide.new_full((), count)).to(x.dtype)
            count = torch.full_like(wide, count)
            if is_inside:
                return operator(wide, count).to(x.dtype)
        count = count.to(torch.int32)
        inside = (count >= 0) & (count < bits)
        most = bits - int(x.dtype.is_signed)
        safe = torch.where(inside, count, torch.full_like(count, most))
        result = operator(wide, safe)
        if to_left:
            result = torch.where(inside, result, torch.zeros_like(result))
        return result.to(x.dtype)

    return rewrite


_left = _shift(aten.__lshift__.Tensor, True)
_right = _shift(aten.__rshift__.Tensor, False)


_INSIDE: Mapping[Any, Callable[..., Any]] = {
    aten.__lshift__.Scalar: _left,
    aten.__rshift__.Scalar: _right,
}
"""Rows that others need."""


def _index(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Makes negative indices positive, which the frontend does not do."""
    return aten.index.Tensor(x, _from_the_start(x, indices))


def _from_the_start(x: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    made: list[Tensor | None] = []
    dim = 0
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            made.append(index)
            dim += index.ndim
            continue
        if index is not None:
            index = torch.where(index < 0, index + x.shape[dim], index)
        made.append(index)
        dim += 1
    return made


def _split(x: Tensor, size: int, dim: int = 0) -> Sequence[Tensor]:
    """Rewrites split to split_with_sizes, whose lengths the frontend knows."""
    length = x.shape[dim]
    return x.split_with_sizes([min(size, length - at) for at in range(0, length, size)], dim)


REWRITES: Mapping[OpOverload, Callable[..., Any]] = {
    aten.__lshift__.Scalar: _left,
    aten.__lshift__.Tensor: _left,
    aten.__rshift__.Scalar: _right,
    aten.__rshift__.Tensor: _right,
    aten._to_copy.default: lambda x, **_: x != 0,
    aten.argmax.default: _arg_extreme(torch.amax),
    aten.atan2.default: _atan2,
    aten.argmin.default: _arg_extreme(torch.amin),
    aten.bitwise_left_shift.Tensor: _left,
    aten.bitwise_right_shift.Tensor: _right,
    aten.celu.default: _celu,
    aten.copysign.Tensor: _copysign,
    aten.div.Tensor_mode: _divided,
    aten.erfc.default: _erfc,
    aten.erfinv.default: _erfinv,
    aten.exp2.default: lambda x: (x * math.log(2)).exp(),
    aten.expm1.default: _expm1,
    aten.fmax.default: lambda x, y: torch.where((x >= y) | _is_nan(y), x, y),
    aten.fmin.default: lambda x, y: torch.where((x <= y) | _is_nan(y), x, y),
    aten.fmod.Scalar: _rest("trunc"),
    aten.fmod.Tensor: _rest("trunc"),
    aten.hypot.default: _hypot,
    aten.index.Tensor: _index,
    aten.linalg_vector_norm.default: _norm_of_one,
    aten.log1p.default: _log1p,
    aten.log_sigmoid_forward.default: _log_sigmoid,
    aten.logcumsumexp.default: _log_cumsum_exp,
    aten.max.dim: _with_position(torch.amax),
    aten.min.dim: _with_position(torch.amin),
    aten.remainder.Scalar: _rest("floor"),
    aten.remainder.Tensor: _rest("floor"),
    aten.signbit.default: _sign_bit,
    aten.sort.default: _sort,
    aten.split.Tensor: _split,
    aten.std.correction: _std,
    aten.topk.default: _topk,
    aten.trunc.default: lambda x: torch.where(x < 0, x.ceil(), x.floor()),
}
"""By the operator."""

"""Formulas in the place of the exporter's lowerings, where ONNX Runtime has wrong values.

Kernels of ONNX Runtime and lowerings of onnxscript are right for usual values. `Sigmoid` has half
of its digits at -10 and is 0 from -18 on; `ReduceMax` overlooks NaN, and integers beyond 32 bits;
`exp(x) - 1` has no digit of a small x. Each function computes the same as eager from operators that
are right. They take three to ten times as long as the kernels, so kernels of convolutional networks
stay (`_is_convolved`), and that of `tanh` where nothing magnifies its last digits.
"""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from dynamo_backends.graph.call_decomposition import replace_call
from dynamo_backends.graph.call_tracing import CallTraceCache
from dynamo_backends.verify.trials.call_trials import used_result_indices
from dynamo_backends.verify.trials.samples import packet_name

aten = torch.ops.aten

_FLOAT = (torch.float32,)
_FLOATS = (torch.float32, torch.float64)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_ERFC = (
    -1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806, 0.27886807, -1.13520398,
    1.48851587, -0.82215223, 0.17087277,
)  # fmt: skip


def _expm1(x: Tensor) -> Tensor:
    half = (x * 0.5).tanh()
    return torch.where(x.abs() < 0.5, 2 * half / (-half + 1), x.exp() - 1)


def _log1p(x: Tensor) -> Tensor:
    """Computes log(1 + x) by Kahan's formula, in which the rounding of 1 + x cancels."""
    u = x + 1
    factor = torch.where(x.abs() < 1e8, x / (u - 1), 1.0)
    return torch.where(u == 1, x, u.log() * factor)


def _erfc(x: Tensor) -> Tensor:
    """Computes erfc by a Chebyshev fit with a relative error below 1.2e-7."""
    z = x.abs()
    t = (z * 0.5 + 1).reciprocal()
    sum_ = t * _ERFC[-1]
    for coefficient in _ERFC[-2:0:-1]:
        sum_ = (sum_ + coefficient) * t
    tail = t * (sum_ - z * z + _ERFC[0]).exp()
    return torch.where(x >= 0, tail, -tail + 2)


def _sigmoid(x: Tensor) -> Tensor:
    return ((-x).exp() + 1).reciprocal()


_TANH = (
    -5.70498872745e-3,
    2.06390887954e-2,
    -5.37397155531e-2,
    1.33314422036e-1,
    -3.33332819422e-1,
)


def _tanh(x: Tensor) -> Tensor:
    """Computes tanh as Cephes does: a polynomial near 0, else a quotient."""
    square = x * x
    sum_ = square * _TANH[0] + _TANH[1]
    for coefficient in _TANH[2:]:
        sum_ = sum_ * square + coefficient
    size = x.abs()
    large = -2 / ((size * 2).exp() + 1) + 1
    return torch.where(size < 0.625, sum_ * square * x + x, torch.where(x < 0, -large, large))


def _silu(x: Tensor) -> Tensor:
    return x / ((-x).exp() + 1)


def _glu(x: Tensor, dim: int = -1) -> Tensor:
    a, b = x.chunk(2, dim)
    return a * _sigmoid(b)


def _elu(x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    return torch.where(x > 0, x * scale, _expm1(x * input_scale) * (alpha * scale))


def _celu(x: Tensor, alpha: float = 1) -> Tensor:
    return _elu(x, alpha, 1, 1 / alpha)


def _selu(x: Tensor) -> Tensor:
    return _elu(x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


def _trunc(x: Tensor) -> Tensor:
    return torch.where(x < 0, x.ceil(), x.floor())


def _frac(x: Tensor) -> Tensor:
    return x - _trunc(x)


def _signbit(x: Tensor) -> Tensor:
    """Returns the sign bit, also of -0.0, which is not less than 0."""
    return (x < 0) | (x.reciprocal() < 0)


def _neg_of_bytes(x: Tensor) -> Tensor:
    return (-x.to(torch.int32)).to(torch.uint8)


def _amax(x: Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> Tensor:
    if not x.is_floating_point():
        return _extreme_integer(aten.argmax.default, x, dim, keepdim)
    return torch.where(_has_nan(x, dim, keepdim), torch.nan, x.amax(list(dim), keepdim))


def _amin(x: Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> Tensor:
    if not x.is_floating_point():
        return _extreme_integer(aten.argmin.default, x, dim, keepdim)
    return torch.where(_has_nan(x, dim, keepdim), torch.nan, x.amin(list(dim), keepdim))


def _extreme_integer(where: Any, x: Tensor, dim: Sequence[int], keepdim: bool) -> Tensor:
    """Gathers an integer's extreme by its position, found in all 64 bits."""
    dims = [d % x.dim() for d in dim] or list(range(x.dim()))
    for d in dims:
        x = x.gather(d, where(x, d, True))
    return x if keepdim else _squeeze(x, dims)


def _squeeze(x: Tensor, dims: Iterable[int]) -> Tensor:
    """Squeezes one dimension at a time: onnxscript has no lowering of `squeeze.dims`."""
    for d in sorted((d % max(x.dim(), 1) for d in dims), reverse=True):
        x = x.squeeze(d)
    return x


def _has_nan(x: Tensor, dim: Sequence[int], keepdim: bool) -> Tensor:
    return x.isnan().to(torch.int32).amax(list(dim), keepdim) > 0


def _max(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _amax(x, [dim], keepdim), _argmax(x, dim, keepdim)


def _min(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _amin(x, [dim], keepdim), _argmin(x, dim, keepdim)


def _argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return _first_nan_or(aten.argmax.default, x, dim, keepdim)


def _argmin(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return _first_nan_or(aten.argmin.default, x, dim, keepdim)


def _first_nan_or(op: Any, x: Tensor, dim: int | None, keepdim: bool) -> Tensor:
    found = op(x, dim, keepdim)
    if not x.is_floating_point():
        return found
    nan = x.isnan().to(torch.int32)
    has_nan = nan.amax([] if dim is None else [dim], keepdim) > 0
    return torch.where(has_nan, nan.argmax(dim, keepdim), found)


def _order(x: Tensor) -> Tensor:
    """Numbers in the order of torch, in which NaN is the largest."""
    return torch.where(x.isnan(), math.inf, (x.double() * 0.5).clamp(max=3e38))


def _sort(x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    if not x.dim():
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    indices = aten.sort(_order(x), dim, descending)[1]
    return x.gather(dim, indices), indices


def _topk(
    x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    indices = aten.topk(_order(x), k, dim, largest, sorted)[1]
    return x.gather(dim, indices), indices


def _remainder(x: Tensor, y: Tensor) -> Tensor:
    rest = aten.fmod(x, y)
    return torch.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)


def _copysign(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(_signbit(y), -x.abs(), x.abs())


def _hypot(x: Tensor, y: Tensor) -> Tensor:
    """Squares of neither are formed, so that none overflows."""
    x, y = x.abs(), y.abs()
    largest = torch.maximum(x, y)
    ratio = torch.where((largest > 0) & (largest < math.inf), torch.minimum(x, y) / largest, 0.0)
    return torch.where(
        (x == math.inf) | (y == math.inf), math.inf, largest * (ratio * ratio + 1).sqrt()
    )


def _atan2(y: Tensor, x: Tensor) -> Tensor:
    ratio = y.abs() / x.abs()
    ratio = torch.where((y == 0) & (x == 0), 0.0, ratio)
    angle = torch.where(y.isinf() & x.isinf(), 1.0, ratio).atan()
    return _copysign(torch.where(_signbit(x), -angle + math.pi, angle), y)


def _maximum(x: Tensor, y: Tensor) -> Tensor:
    """Computes the maximum by a comparison, which compares all 64 bits."""
    return torch.where(x > y, x, y)


def _minimum(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(x < y, x, y)


def _fmax(x: Tensor, y: Tensor) -> Tensor:
    return torch.where((x >= y) | y.isnan(), x, y)


def _fmin(x: Tensor, y: Tensor) -> Tensor:
    return torch.where((x <= y) | y.isnan(), x, y)


def _norm(
    x: Tensor, order: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """Computes a norm without squaring single numbers, which might overflow."""
    dims = range(x.dim()) if dim is None else dim if isinstance(dim, Sequence) else [dim]
    if order and all(x.shape[d] == 1 for d in dims):
        x = x.abs().to(dtype or x.dtype)
        return x if keepdim else _squeeze(x, dims)
    return aten.linalg_vector_norm(x, order, dim, keepdim, dtype=dtype)


def _std(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    """Computes the standard deviation in float64, as eager does, against overflow."""
    dims = list(dim or range(x.dim()))
    wide = x.double()
    squares = (wide - wide.mean(dims, True)).square().sum(dims, keepdim)
    count = math.prod(x.shape[d] for d in dims) - (1 if correction is None else correction)
    return (squares / max(count, 0)).sqrt().to(x.dtype)


def _logsumexp(x: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:
    """Rows may hold infinities, which the kernel subtracts from one another."""
    dims = list(dim) or list(range(x.dim()))
    largest = x.amax(dims, True)
    largest = torch.where(largest.abs() == math.inf, 0.0, largest)
    result = (x - largest).exp().sum(dims, True).log() + largest
    return result if keepdim else _squeeze(result, dims)


def _max_pool(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    pool = aten.max_pool2d_with_indices
    values, indices = pool(x, *args)
    return torch.where(pool(x.isnan().to(x.dtype), *args)[0] > 0, torch.nan, values), indices


def _prod(x: Tensor, *, dtype: Any = None) -> Tensor:
    return _prod_of_dim(x.reshape(-1), 0, dtype=dtype)


def _prod_of_dim(x: Tensor, dim: int, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """Products of halves, in 64 bits, which wrap around; the kernel computes in float64."""
    x = x.to(dtype or torch.int64)
    if not x.shape[dim]:
        return x.sum(dim, keepdim) + 1
    while (size := x.shape[dim]) > 1:
        half = size // 2
        product = x.narrow(dim, 0, half) * x.narrow(dim, half, half)
        x = torch.cat([product, x.narrow(dim, size - 1, 1)], dim) if size % 2 else product
    return x if keepdim else x.squeeze(dim)


def _is_on_cpu(node: fx.Node) -> bool:
    """Returns whether a call is on a CPU: TensorRT has no float64."""
    return bool(node.all_input_nodes[0].meta["val"].device.type == "cpu")


def _is_rsqrt(node: fx.Node) -> bool:
    """Returns whether an exponent is -0.5, which eager computes as `rsqrt`."""
    return bool(node.args[1] == -0.5)


def _always(_: fx.Node) -> bool:
    return True


def _is_pool_of_rows(node: fx.Node) -> bool:
    """Returns whether a pool is `max_pool1d`: a formula would slow down 2-D pools."""
    return node.all_input_nodes[0].meta["val"].shape[-2] == 1 and 1 not in used_result_indices(node)


class Formula(NamedTuple):
    """A replacement for a call: a function of its arguments, and when it applies.

    Attributes:
        function: Takes its arguments.
        dtypes: Of the first one.
        when: Whether a call is replaced.
    """

    function: Callable[..., Any]
    dtypes: tuple[torch.dtype, ...] = _FLOAT
    when: Callable[[fx.Node], bool] = _always


FORMULAS: Mapping[Any, Formula] = {
    aten.expm1.default: Formula(_expm1),
    aten.log1p.default: Formula(_log1p),
    aten.erfc.default: Formula(_erfc),
    aten.tanh.default: Formula(_tanh),
    aten.sigmoid.default: Formula(_sigmoid),
    aten.silu.default: Formula(_silu),
    aten.glu.default: Formula(_glu),
    aten.elu.default: Formula(_elu),
    aten.celu.default: Formula(_celu),
    aten.selu.default: Formula(_selu),
    aten.trunc.default: Formula(_trunc, _FLOATS),
    aten.frac.default: Formula(_frac, _FLOATS),
    aten.signbit.default: Formula(_signbit, _FLOATS),
    aten.neg.default: Formula(_neg_of_bytes, (torch.uint8,)),
    aten.amax.default: Formula(_amax, (*_FLOATS, torch.int64)),
    aten.amin.default: Formula(_amin, (*_FLOATS, torch.int64)),
    aten.max.dim: Formula(_max, (*_FLOATS, torch.int64)),
    aten.min.dim: Formula(_min, (*_FLOATS, torch.int64)),
    aten.argmax.default: Formula(_argmax, _FLOATS),
    aten.argmin.default: Formula(_argmin, _FLOATS),
    aten.linalg_vector_norm.default: Formula(_norm),
    aten.max.default: Formula(_amax, _FLOATS),
    aten.min.default: Formula(_amin, _FLOATS),
    aten.sort.default: Formula(_sort, _FLOAT, _is_on_cpu),
    aten.topk.default: Formula(_topk, _FLOAT, _is_on_cpu),
    aten.remainder.Tensor: Formula(_remainder, _FLOATS),
    aten.copysign.Tensor: Formula(_copysign, _FLOATS),
    aten.hypot.default: Formula(_hypot),
    aten.atan2.default: Formula(_atan2),
    aten.maximum.default: Formula(_maximum, (torch.int64,)),
    aten.minimum.default: Formula(_minimum, (torch.int64,)),
    aten.fmax.default: Formula(_fmax, _FLOATS),
    aten.fmin.default: Formula(_fmin, _FLOATS),
    aten.pow.Tensor_Scalar: Formula(lambda x, _: x.rsqrt(), _FLOAT, _is_rsqrt),
    aten.std.correction: Formula(_std, _FLOAT, _is_on_cpu),
    aten.logsumexp.default: Formula(_logsumexp, _FLOATS),
    aten.max_pool2d_with_indices.default: Formula(_max_pool, _FLOATS, _is_pool_of_rows),
    aten.prod.default: Formula(_prod, _INTEGERS),
    aten.prod.dim_int: Formula(_prod_of_dim, _INTEGERS),
}


def has_formula(node: fx.Node) -> bool:
    """Returns whether a call is replaced by a formula, given its dtype and arguments."""
    formula = FORMULAS.get(node.target)
    source = node.args[0] if node.args else None
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    if formula is None or not isinstance(value, Tensor) or value.dtype not in formula.dtypes:
        return False
    return formula.when(node)


_MAGNIFYING = frozenset(
    "acos asin atanh div eq ge gt le log log1p log2 log10 lt ne reciprocal".split()  # noqa: SIM905
)
"""Operators that make much of the last digits of an operand."""


def _is_magnified(node: fx.Node) -> bool:
    """Returns whether users amplify the last digits of a result, or its distance from 1."""
    own = {node, *node.all_input_nodes}
    return any(
        (name := packet_name(user.target)) in _MAGNIFYING
        or (name in ("sub", "rsub") and own.issuperset(user.all_input_nodes))
        for user in node.users
    )


_CARRYING = frozenset(
    """add cat max_pool2d_with_indices mul slice split split_with_sizes
    upsample_nearest2d""".split()  # noqa: SIM905
)
"""Operators that leave a convolution's input in its layout."""


def _is_convolved(node: fx.Node) -> bool:
    """Returns whether only convolutions, and means beside them, read a result.

    Their sums have larger errors than the kernel of `Sigmoid`, which is off by 6e-8 at most.
    """
    seen, readers = {node}, set()
    waiting = [node]
    while waiting:
        for user in waiting.pop().users:
            name = "" if user.op == "output" else packet_name(user.target)
            if name in _CARRYING or user.target is operator.getitem:
                waiting += {user} - seen
                seen.add(user)
            else:
                readers.add(name)
    return "convolution" in readers <= {"convolution", "mean", "_adaptive_avg_pool2d"}


def _stays(node: fx.Node, kind: str) -> bool:
    """Returns whether a call keeps the vendor's kernel, which is faster but less exact.

    Args:
        node: The call.
        kind: Of its graph: gradients magnify 1 - tanh².
    """
    if node.target is aten.tanh.default:
        return kind == "inference" and not _is_magnified(node)
    return node.target in (aten.sigmoid.default, aten.silu.default) and _is_convolved(node)


def apply_formulas(module: fx.GraphModule, kind: str) -> None:
    """Replaces each call that has a formula by the formula's ATen calls, in place.

    Args:
        module: Of a graph.
        kind: The graph's.
    """
    traces = CallTraceCache()
    for node in list(module.graph.nodes):
        if node.op == "call_function" and has_formula(node) and not _stays(node, kind):
            replace_call(node, FORMULAS[node.target].function, traces=traces)

"""Formulas in the place of the exporter's lowerings, where ONNX Runtime has wrong values.

Kernels of ONNX Runtime and lowerings of onnxscript are right for usual values. `Sigmoid` has half
of its digits at -10 and is 0 from -18 on; `ReduceMax` overlooks NaN, and integers beyond 32 bits;
`exp(x) - 1` has no digit of a small x. Each function computes the same as eager from operators that
are right.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from dynamo_backends.graph.call_tracing import CallTraces
from dynamo_backends.graph.decompose import replace

aten = torch.ops.aten

_FLOAT = (torch.float32,)
_FLOATS = (torch.float32, torch.float64)
_ERFC = (
    -1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806, 0.27886807, -1.13520398,
    1.48851587, -0.82215223, 0.17087277,
)  # fmt: skip


def _expm1(x: Tensor) -> Tensor:
    half = (x * 0.5).tanh()
    return torch.where(x.abs() < 0.5, 2 * half / (-half + 1), x.exp() - 1)


def _log1p(x: Tensor) -> Tensor:
    """Kahan's: the rounding of 1 + x cancels; large numbers, where it is none, are left alone."""
    u = x + 1
    factor = torch.where(x.abs() < 1e8, x / (u - 1), 1.0)
    return torch.where(u == 1, x, u.log() * factor)


def _erfc(x: Tensor) -> Tensor:
    """Chebyshev's approximation of Numerical Recipes, with a relative error below 1.2e-7."""
    z = x.abs()
    t = (z * 0.5 + 1).reciprocal()
    sum_ = t * _ERFC[-1]
    for coefficient in _ERFC[-2:0:-1]:
        sum_ = (sum_ + coefficient) * t
    tail = t * (sum_ - z * z + _ERFC[0]).exp()
    return torch.where(x >= 0, tail, -tail + 2)


def _sigmoid(x: Tensor) -> Tensor:
    return ((-x).exp() + 1).reciprocal()


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
    """By its position: kernels of positions compare all 64 bits."""
    dims = [d % x.dim() for d in dim] or list(range(x.dim()))
    for d in dims:
        x = x.gather(d, where(x, d, True))
    for d in sorted(dims, reverse=True) if not keepdim else ():
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


def _norm(
    x: Tensor, order: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """In float64, as eager: squares of large numbers do not overflow, nor do small ones vanish."""
    return aten.linalg_vector_norm(x.double(), order, dim, keepdim).to(dtype or x.dtype)


class Formula(NamedTuple):
    """What replaces a call.

    Attributes:
        function: Takes its arguments.
        dtypes: Of the first one.
    """

    function: Callable[..., Any]
    dtypes: tuple[torch.dtype, ...] = _FLOAT


FORMULAS: Mapping[Any, Formula] = {
    aten.expm1.default: Formula(_expm1),
    aten.log1p.default: Formula(_log1p),
    aten.erfc.default: Formula(_erfc),
    aten.sigmoid.default: Formula(_sigmoid),
    aten.silu.default: Formula(_silu),
    aten.glu.default: Formula(_glu),
    aten.elu.default: Formula(_elu),
    aten.celu.default: Formula(_celu),
    aten.selu.default: Formula(_selu),
    aten.trunc.default: Formula(_trunc, _FLOATS),
    aten.frac.default: Formula(_frac, _FLOATS),
    aten.neg.default: Formula(_neg_of_bytes, (torch.uint8,)),
    aten.amax.default: Formula(_amax, (*_FLOATS, torch.int64)),
    aten.amin.default: Formula(_amin, (*_FLOATS, torch.int64)),
    aten.max.dim: Formula(_max, (*_FLOATS, torch.int64)),
    aten.min.dim: Formula(_min, (*_FLOATS, torch.int64)),
    aten.argmax.default: Formula(_argmax, _FLOATS),
    aten.argmin.default: Formula(_argmin, _FLOATS),
    aten.linalg_vector_norm.default: Formula(_norm),
}


def has_formula(node: fx.Node) -> bool:
    """Whether a call is computed by a formula."""
    formula = FORMULAS.get(node.target)
    source = node.args[0] if node.args else None
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    return formula is not None and isinstance(value, Tensor) and value.dtype in formula.dtypes


def apply_formulas(module: fx.GraphModule) -> None:
    """Replaces calls by their formulas, in place."""
    traces = CallTraces()
    for node in list(module.graph.nodes):
        if node.op == "call_function" and has_formula(node):
            replace(node, FORMULAS[node.target].function, traces=traces)

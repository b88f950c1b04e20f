"""Softmax, and normalisation over layers, groups and batches. Batch norm has no gradient here.

Statistics are float32 for the halves. Their gradients torch decomposes.
"""

from collections.abc import Sequence

from dynamo_backends.nvfuser.lowering.reduction import widen
from dynamo_backends.nvfuser.lowering.registry import Call, Unsupported, register_lowering
from dynamo_backends.nvfuser.recorder import Value


def _shifted(call: Call, x: Value, dim: int) -> tuple[Value, tuple[int, ...]]:
    """Numbers of which the largest is 0, and the dimensions along which it is."""
    if not x.is_floating_point:
        x = x.cast(call.dtype)
    x = widen(x)
    over = x.dims(dim)
    return x - x.reduce("max", over, keepdim=True), over


@register_lowering("_softmax.default", context=True)
def softmax(call: Call, x: Value, dim: int, half_to_float: bool) -> Value:
    shifted, over = _shifted(call, x, dim)
    exp = shifted.unary("exp")
    return exp / exp.sum(over, keepdim=True)


@register_lowering("_log_softmax.default", context=True)
def log_softmax(call: Call, x: Value, dim: int, half_to_float: bool) -> Value:
    shifted, over = _shifted(call, x, dim)
    return shifted - shifted.unary("exp").sum(over, keepdim=True).unary("log")


def moments(x: Value, over: Sequence[int]) -> tuple[Value, Value]:
    """Variance and mean over some dimensions, which are kept with size 1.

    Raises:
        Unsupported: There is but one element along them.
    """
    if x.elements(over) < 2:
        raise Unsupported("it normalizes over a single element")
    var, mean = x.recorder.var_mean(x, over, 0, keepdim=True)
    return var, mean


def standardise(x: Value, over: Sequence[int], eps: float) -> tuple[Value, Value, Value]:
    """Normalised values, mean and 1/std over some dimensions, which are kept with size 1.

    Raises:
        Unsupported: There is but one element along them.
    """
    var, mean = moments(x, over)
    rstd = (var + eps).unary("rsqrt")
    return (x - mean) * rstd, mean, rstd


def affine(x: Value, weight: Value | None, bias: Value | None) -> Value:
    """Scaled and shifted by what is given of both."""
    if weight is not None:
        x = x * widen(weight)
    return x if bias is None else x + widen(bias)


@register_lowering("native_layer_norm.default")
def layer_norm(
    x: Value,
    normalized_shape: Sequence[int],
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
) -> tuple[Value, Value, Value]:
    over = range(x.ndim - len(normalized_shape), x.ndim)
    normalised, mean, rstd = standardise(widen(x), over, eps)
    return affine(normalised, weight, bias), mean, rstd


@register_lowering("native_group_norm.default")
def group_norm(
    x: Value,
    weight: Value | None,
    bias: Value | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> tuple[Value, Value, Value]:
    grouped = widen(x).reshape((N, group, C // group, HxW))
    normalised, mean, rstd = standardise(grouped, (2, 3), eps)

    def spread(vector: Value | None) -> Value | None:
        return None if vector is None else vector.reshape((1, group, C // group, 1))

    out = affine(normalised, spread(weight), spread(bias))
    return out.reshape(x.shape), mean.reshape((N, group)), rstd.reshape((N, group))


Optional = Value | None


def _spread(x: Value, vector: Optional) -> Optional:
    """Returns a vector of one number per channel, ready to broadcast."""
    return None if vector is None else vector.unsqueeze([d for d in range(x.ndim) if d != 1])


def _inference(
    x: Value, weight: Optional, bias: Optional, mean: Value, var: Value, eps: float
) -> tuple[Value, Value]:
    """Returns the result, and 1/std per channel."""
    invstd = (widen(var) + eps).unary("rsqrt")
    scale = invstd if weight is None else invstd * widen(weight)
    centred = widen(x) - _spread(x, widen(mean))  # type: ignore[operator]
    return affine(centred * _spread(x, scale), None, _spread(x, bias)), invstd  # type: ignore[operator]


def _training(
    x: Value,
    weight: Optional,
    bias: Optional,
    running_mean: Optional,
    running_var: Optional,
    momentum: float,
    eps: float,
) -> tuple[Value, Value, Value, Optional, Optional]:
    wide = widen(x)
    others = [d for d in range(x.ndim) if d != 1]
    var, mean = moments(wide, others)
    invstd = (var + eps).unary("rsqrt")
    out = affine((wide - mean) * invstd, _spread(x, weight), _spread(x, bias))
    var, mean, invstd = (v.squeeze(others) for v in (var, mean, invstd))
    if running_mean is not None:
        running_mean = mean * momentum + widen(running_mean) * (1 - momentum)
    if running_var is not None:
        unbiased = var * wide.count(others) / wide.count(others, less=1)
        running_var = unbiased * momentum + widen(running_var) * (1 - momentum)
    return out, mean, invstd, running_mean, running_var


def _saved(call: Call, index: int, value: Value) -> Optional:
    """Returns a statistic for the backward; None where torch leaves it empty."""
    return value if call.out[index].numel() else None


@register_lowering("_native_batch_norm_legit_no_training.default", context=True)
def batch_norm_no_training(
    call: Call,
    x: Value,
    weight: Optional,
    bias: Optional,
    running_mean: Value,
    running_var: Value,
    momentum: float,
    eps: float,
) -> tuple[Optional, ...]:
    out, invstd = _inference(x, weight, bias, running_mean, running_var, eps)
    return out, _saved(call, 1, running_mean), _saved(call, 2, invstd)


@register_lowering("_native_batch_norm_legit.no_stats")
def batch_norm_no_stats(
    x: Value,
    weight: Optional,
    bias: Optional,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value, Value, Value]:
    return _training(x, weight, bias, None, None, momentum, eps)[:3]


@register_lowering("_native_batch_norm_legit_functional.default", context=True)
def batch_norm_functional(
    call: Call,
    x: Value,
    weight: Optional,
    bias: Optional,
    running_mean: Value,
    running_var: Value,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Optional, ...]:
    if training:
        return _training(x, weight, bias, running_mean, running_var, momentum, eps)
    out, invstd = _inference(x, weight, bias, running_mean, running_var, eps)
    saved = _saved(call, 1, running_mean), _saved(call, 2, invstd)
    return out, *saved, running_mean, running_var

"""Batch normalisation. Its gradient torch decomposes."""

from dynamo_backends.nvfuser.lowering.normalization import affine, moments
from dynamo_backends.nvfuser.lowering.reduction import widen
from dynamo_backends.nvfuser.lowering.registry import Call, lowers
from dynamo_backends.nvfuser.recorder import Value

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


@lowers("_native_batch_norm_legit_no_training.default", context=True)
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


@lowers("_native_batch_norm_legit.no_stats")
def batch_norm_no_stats(
    x: Value,
    weight: Optional,
    bias: Optional,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value, Value, Value]:
    return _training(x, weight, bias, None, None, momentum, eps)[:3]


@lowers("_native_batch_norm_legit_functional.default", context=True)
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

"""Softmax, and normalisation over layers and groups.

Statistics are float32 for the halves. Their gradients torch decomposes.
"""

from collections.abc import Sequence

from dynamo_backends.nvfuser.lowering.reduction import widen
from dynamo_backends.nvfuser.lowering.registry import Call, Unsupported, lowers
from dynamo_backends.nvfuser.recorder import Value


def _shifted(call: Call, x: Value, dim: int) -> tuple[Value, tuple[int, ...]]:
    """Numbers of which the largest is 0, and the dimensions along which it is."""
    if not x.is_floating_point:
        x = x.cast(call.dtype)
    x = widen(x)
    over = x.dims(dim)
    return x - x.reduce("max", over, keepdim=True), over


@lowers("_softmax.default", context=True)
def softmax(call: Call, x: Value, dim: int, half_to_float: bool) -> Value:
    shifted, over = _shifted(call, x, dim)
    exp = shifted.unary("exp")
    return exp / exp.sum(over, keepdim=True)


@lowers("_log_softmax.default", context=True)
def log_softmax(call: Call, x: Value, dim: int, half_to_float: bool) -> Value:
    shifted, over = _shifted(call, x, dim)
    return shifted - shifted.unary("exp").sum(over, keepdim=True).unary("log")


def moments(x: Value, over: Sequence[int]) -> tuple[Value, Value]:
    """Variance and mean over some dimensions, which are kept with size 1.

    Raises:
        Unsupported: There is but one element along them.
    """
    if x.elements(over) < 2:
        raise Unsupported("it normalises single elements")
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


@lowers("native_layer_norm.default")
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


@lowers("native_group_norm.default")
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

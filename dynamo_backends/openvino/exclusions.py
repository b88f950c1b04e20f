"""Which calls are not given to OpenVINO although its frontend would convert them."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.graph.decomposition_tables import nested_decomposition_table
from dynamo_backends.verify.trials.call_trials import sanitize_norm_sample
from dynamo_backends.verify.trials.samples import without_nan

_TRUNCATED = "it is lowered to x - y * trunc(x / y), which loses all precision for large x / y"
_FLOORED = "it is lowered to x - y * floor(x / y), which loses all precision for large x / y"
WRONG: dict[str, str] = {
    "fmod.Scalar": _TRUNCATED,
    "fmod.Tensor": _TRUNCATED,
    "remainder.Scalar": _FLOORED,
    "remainder.Tensor": _FLOORED,
}
"""Conversions of floating-point calls that are wrong on inputs that a trial does not show, by the
overload's name."""

LOSE_NAN = frozenset(
    {
        "max_pool2d_with_indices.default",
        "max_pool3d_with_indices.default",
    }
)
"""Operators in which OpenVINO's kernels turn NaN into a number, as the processor's own maximum and
minimum do. Without them hardly any network would run whole, so their trials have no NaN; other
operators that lose it are refused by their trial."""

WHOLE = (
    "_scaled_dot_product_flash_attention_for_cpu.default",
    "addcmul.default",
    "baddbmm.default",
    "celu.default",
    "clamp_max.default",
    "clamp_min.default",
    "elu.default",
    "gelu.default",
    "glu.default",
    "hardsigmoid.default",
    "hardswish.default",
    "index_add.default",
    "leaky_relu.default",
    "log_sigmoid_forward.default",
    "masked_fill.Scalar",
    "masked_fill.Tensor",
    "mish.default",
    "pixel_shuffle.default",
    "pixel_unshuffle.default",
    "reflection_pad1d.default",
    "reflection_pad2d.default",
    "reflection_pad3d.default",
    "roll.default",
    "rsub.Scalar",
    "silu.default",
    "split.Tensor",
    "stack.default",
    "std.correction",
    "sum.default",
    "t.default",
    "transpose.int",
    "tril.default",
    "triu.default",
    "unbind.int",
    "upsample_nearest1d.default",
    "upsample_nearest2d.default",
    "upsample_nearest3d.default",
)
"""Composite operators that the frontend has rules for: what OpenVINO makes of them whole is faster
or more exact than what it makes of torch's decompositions."""

_MOST_CONVERTED = 2.0**30
"""OpenVINO makes 32-bit integers of floating-point numbers, and of those 64-bit ones."""


def why_excluded(node: fx.Node) -> str | None:
    """Why a call is not given to OpenVINO; None if its conversion may be tried."""
    reason = WRONG.get(str(node.target).removeprefix("aten."))
    return reason if reason and node.meta["val"].dtype.is_floating_point else None


def _is_integer(value: Tensor) -> bool:
    return not value.is_floating_point() and value.dtype != torch.bool


def nested_decompositions() -> Mapping[OpOverload, Callable[..., Any]]:
    """Returns the decompositions for operators inside the decompositions of calls."""
    return nested_decomposition_table(undecomposed_operators(), ())


def sanitize_sample(node: fx.Node, tensor: Tensor) -> Tensor:
    """Removes from a trial input the values on which a call is known to differ."""
    name = str(node.target).removeprefix("aten.")
    tensor = sanitize_norm_sample(node, tensor)
    made = node.meta["val"]
    if name == "_to_copy.default" and _is_integer(made) and tensor.is_floating_point():
        most = min(_MOST_CONVERTED, torch.finfo(tensor.dtype).max)
        tensor = tensor.clamp(-most, most)  # indices are, beyond are none
    return without_nan(tensor) if name in LOSE_NAN else tensor


@functools.cache
def undecomposed_operators() -> frozenset[OpOverload]:
    """Returns the overloads in `WHOLE` that this torch has; they are not decomposed."""
    found = set()
    for name in WHOLE:
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet, None), overload, None)
        if operator is not None:
            found.add(operator)
    return frozenset(found)

"""Lists calls that are not given to TVM although its importer would convert them."""

import functools
from typing import Any

from torch import Tensor, fx

from dynamo_backends._torch_private import OpOverload

_DIVISIONS = frozenset(
    {
        "div.Tensor_mode",
        "div.Scalar_mode",
        "floor_divide.default",
        "fmod.Scalar",
        "fmod.Tensor",
        "remainder.Scalar",
        "remainder.Tensor",
    }
)

WHOLE = (
    "addmm.default",
    "baddbmm.default",
    "leaky_relu.default",
    "native_group_norm.default",
    "native_layer_norm.default",
    "roll.default",
    "silu.default",
    "stack.default",
    "std.correction",
    "tril.default",
    "triu.default",
)
"""Composite operators that TVM's importer has conversions for: fewer calls, fewer loops."""


def why_not(node: fx.Node) -> str | None:
    """Returns why a call is not given to TVM; None if its conversion may be tried."""
    name = str(node.target).removeprefix("aten.")
    divisor = node.args[1] if len(node.args) > 1 else None
    safe = isinstance(divisor, int) and divisor != 0
    if name in _DIVISIONS and not safe and _is_integer(node.meta.get("val")):
        return "an integer division by zero would crash the process"
    return None


def _is_integer(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.dtype.is_floating_point


@functools.cache
def whole_operators() -> frozenset[OpOverload]:
    """Returns the overloads of `WHOLE` that this torch and this TVM have."""
    from dynamo_backends.tvm.converters import convertible

    names = set(WHOLE)
    return frozenset(op for op in convertible() if str(op).removeprefix("aten.") in names)

"""Lists calls that are not given to IREE although it would compile them."""

from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends.iree.formulas import in_dtype
from dynamo_backends.iree.indices import why_unguarded
from dynamo_backends.iree.legalize import FOR_FLOAT32

_DIGITS = "it is computed from exponentials, which loses all precision for small x"
_OVERFLOW = "it is computed from exponentials, which overflow for large x"
_SHIFT = "shifts by at least the bit width of the type are undefined in IREE"

WRONG: dict[str, str] = {
    "acosh.default": _OVERFLOW,
    "asinh.default": _DIGITS,
    "atanh.default": _DIGITS,
    "cosh.default": _OVERFLOW,
    "logcumsumexp.default": _OVERFLOW,
    "sinh.default": _DIGITS,
    "tan.default": "it loses precision for large x",
    "__lshift__.Tensor": _SHIFT,
    "__rshift__.Tensor": _SHIFT,
    "bitwise_left_shift.Tensor": _SHIFT,
    "bitwise_right_shift.Tensor": _SHIFT,
}
"""Lowerings that are wrong on inputs that a trial does not show, by the overload's name; those that
`legalize` has for float32 count in float64 alone."""

UNSETTLED_AT_INFINITY = frozenset({"gelu.default"})
"""Where eager itself gives a number or NaN, depending on how many elements there are."""

_PRODUCTS = {
    "addmm.default": 2,
    "baddbmm.default": 2,
    "bmm.default": 1,
    "convolution.default": 1,
    "mm.default": 1,
}
"""Sums of products, and the position of the right operand."""

_DIVISIONS = frozenset(
    {
        "div.Tensor_mode",
        "div.Scalar_mode",
        "floor_divide.default",
        "floor_divide.Scalar",
        "fmod.Tensor",
        "fmod.Scalar",
        "remainder.Tensor",
        "remainder.Scalar",
        "remainder.Scalar_Tensor",
    }
)


WHOLE = (torch.ops.aten.logsumexp.default, torch.ops.aten.silu.default)
"""What `legalize` has in other words than torch's decompositions."""

DECOMPOSED = (torch.ops.aten.squeeze.dims,)
"""What many decompositions end with; IREE has nothing for it."""


def why_not(node: fx.Node) -> str | None:
    """Returns why a call is not given to IREE; None if it may be tried."""
    name = str(node.target).removeprefix("aten.")
    if name in WRONG and not (node.target in FOR_FLOAT32 and _is_narrower(node)):
        return WRONG[name]
    if name in _DIVISIONS and _may_trap(node):
        return "an integer division by zero would crash the process"
    return why_unguarded(node)


def _is_narrower(node: fx.Node) -> bool:
    """Returns whether a call is one of numbers of float32 or narrower ones."""
    dtype = node.meta["val"].dtype
    return bool(dtype.is_floating_point and dtype != torch.float64)


def _may_trap(node: fx.Node) -> bool:
    """Returns whether a division is of integers, by something other than a harmless constant."""
    value: Tensor = node.meta["val"]
    if value.dtype.is_floating_point:
        return False
    divisor: Any = node.args[1]
    if isinstance(divisor, fx.Node | bool) or value.dtype == torch.bool:
        return True
    return in_dtype(divisor, value.dtype) in (0, in_dtype(-1, value.dtype))


def is_unsettled_at_infinity(node: fx.Node) -> bool:
    """Returns whether a call is one of `UNSETTLED_AT_INFINITY`."""
    return str(node.target).removeprefix("aten.") in UNSETTLED_AT_INFINITY


def right_operand(node: fx.Node) -> tuple[fx.Node, int] | None:
    """Returns a contraction's right operand and the length of its reduction, or None."""
    place = _PRODUCTS.get(str(node.target).removeprefix("aten."))
    operand: Any = node.args[place] if place is not None else None
    if not isinstance(operand, fx.Node):
        return None
    value: Tensor = operand.meta["val"]
    count = value[0].numel() if "convolution" in str(node.target) else value.shape[-2]
    return operand, count


def is_random(node: fx.Node) -> bool:
    """Returns whether a call draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())

"""Matrix products: zeros along the dimension that is summed over.

On both sides, since 0 × NaN is NaN.
"""

from dynamo_backends.xla.lowering.padded.call import Operand, PaddedCall, Placed
from dynamo_backends.xla.lowering.padded.extents import Extents
from dynamo_backends.xla.lowering.padded.registry import register_padding_rule


def _product(call: PaddedCall, left: str, right: str) -> Placed:
    """Returns a product over the last dimension of one operand and the last but one of another."""
    x, y = call[left], call[right]
    row, column = x.ndim - 1, max(y.ndim - 2, 0)
    (summed,) = call.agreed((x.extents[row],), (y.extents[column],))
    batch = call.agreed(x.extents[: x.ndim - 2], y.extents[: y.ndim - 2])
    inner: Extents = (*x.extents[max(x.ndim - 2, 0) : row], *y.extents[column + 1 :])
    x = x.aligned((*batch[: x.ndim - 2], *x.extents[max(x.ndim - 2, 0) : row], summed))
    y = y.aligned((*batch[: y.ndim - 2], summed, *y.extents[column + 1 :]))
    result = (*batch, *inner)
    given = {left: x.whole([row]), right: y.whole([column])}
    added = call.get("self") if left != "self" else None
    if added is not None:
        if call.agreed(added.extents, result) != result:
            raise call.refuse("the added tensor and the product are padded differently")
        given["self"] = added.aligned(result).array
    return call.run(**given), result


@register_padding_rule("mm.default", "bmm.default", "mm.dtype", "bmm.dtype")
def mm(call: PaddedCall) -> Placed:
    return _product(call, "self", "mat2")


@register_padding_rule("mv.default")
def mv(call: PaddedCall) -> Placed:
    return _product(call, "self", "vec")


@register_padding_rule("addmm.default", "addmm.dtype", "_addmm_activation.default")
def addmm(call: PaddedCall) -> Placed:
    return _product(call, "mat1", "mat2")


@register_padding_rule("addmv.default")
def addmv(call: PaddedCall) -> Placed:
    return _product(call, "mat", "vec")


@register_padding_rule("baddbmm.default", "baddbmm.dtype")
def baddbmm(call: PaddedCall) -> Placed:
    return _product(call, "batch1", "batch2")


@register_padding_rule("dot.default", "vdot.default")
def dot(call: PaddedCall) -> Placed:
    return _product(call, "self", "other" if call.get("other") else "tensor")


@register_padding_rule("linear.default")
def linear(call: PaddedCall) -> Placed:
    x: Operand = call["input"]
    call.need_whole("weight")
    call.need_whole("input", [x.ndim - 1])
    return call.run(), (*x.extents[:-1], *call["weight"].extents[:-1])

"""Matrix products: zeros along the dimension that is summed over.

On both sides, since 0 × NaN is NaN.
"""

from dynamo_backends.xla.lowering.padded.call import Operand, PaddedCall, Placed
from dynamo_backends.xla.lowering.padded.extents import Extents
from dynamo_backends.xla.lowering.padded.registry import pads


def _product(call: PaddedCall, left: str, right: str) -> Placed:
    """A product over the last dimension of one operand and the last but one of another."""
    x, y = call[left], call[right]
    row, column = x.ndim - 1, max(y.ndim - 2, 0)
    if x.extents[row] != y.extents[column]:
        raise call.refuse("what is summed over is padded differently in its operands")
    batch = call.need_agreeing(x.extents[: x.ndim - 2], y.extents[: y.ndim - 2])
    inner: Extents = (*x.extents[max(x.ndim - 2, 0) : row], *y.extents[column + 1 :])
    masked = {left: x.masked([row]), right: y.masked([column])}
    result = (*batch, *inner)
    added = call.get("self") if left != "self" else None
    if added is not None:
        call.need_agreeing(added.extents, result)
    return call.run(**masked), result


@pads("mm.default", "bmm.default", "mm.dtype", "bmm.dtype")
def mm(call: PaddedCall) -> Placed:
    return _product(call, "self", "mat2")


@pads("mv.default")
def mv(call: PaddedCall) -> Placed:
    return _product(call, "self", "vec")


@pads("addmm.default", "addmm.dtype", "_addmm_activation.default")
def addmm(call: PaddedCall) -> Placed:
    return _product(call, "mat1", "mat2")


@pads("addmv.default")
def addmv(call: PaddedCall) -> Placed:
    return _product(call, "mat", "vec")


@pads("baddbmm.default", "baddbmm.dtype")
def baddbmm(call: PaddedCall) -> Placed:
    return _product(call, "batch1", "batch2")


@pads("dot.default", "vdot.default")
def dot(call: PaddedCall) -> Placed:
    return _product(call, "self", "other" if call.get("other") else "tensor")


@pads("linear.default")
def linear(call: PaddedCall) -> Placed:
    x: Operand = call["input"]
    call.need_whole("weight")
    call.need_whole("input", [x.ndim - 1])
    return call.run(), (*x.extents[:-1], *call["weight"].extents[:-1])

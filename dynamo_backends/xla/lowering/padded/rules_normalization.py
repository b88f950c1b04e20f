"""Softmax, and normalisation over layers."""

from dynamo_backends.xla.lowering.padded.call import PaddedCall, Placed
from dynamo_backends.xla.lowering.padded.registry import register_padding_rule
from dynamo_backends.xla.lowering.padded.rules_reduction import lowest


@register_padding_rule("_softmax.default", "_log_softmax.default")
def softmax(call: PaddedCall) -> Placed:
    x = call["self"]
    return call.run(self=x.masked(call.axes("self", "dim"), lowest)), x.extents


def _normalised(call: PaddedCall) -> int:
    """Returns the number of outer dimensions; the inner ones have to be whole."""
    ndim = call["input"].ndim
    outer = ndim - len(call.value("normalized_shape"))
    call.need_whole("input", range(outer, ndim))
    call.need_whole("weight")
    return outer


@register_padding_rule("native_layer_norm.default")
def layer_norm(call: PaddedCall) -> Placed:
    x, outer = call["input"], _normalised(call)
    kept = x.without(range(outer, x.ndim), keepdim=True)
    return call.run(), (x.extents, kept, kept)


@register_padding_rule("_fused_rms_norm.default")
def rms_norm(call: PaddedCall) -> Placed:
    x, outer = call["input"], _normalised(call)
    return call.run(), (x.extents, x.without(range(outer, x.ndim), keepdim=True))

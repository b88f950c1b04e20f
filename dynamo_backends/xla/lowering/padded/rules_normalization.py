"""Softmax, and normalisation over layers."""

from dynamo_backends.xla.lowering.padded.call import PaddedCall, Placed
from dynamo_backends.xla.lowering.padded.registry import pads
from dynamo_backends.xla.lowering.padded.rules_reduction import lowest


@pads("_softmax.default", "_log_softmax.default")
def softmax(call: PaddedCall) -> Placed:
    x = call["self"]
    return call.run(self=x.masked(call.axes("self", "dim"), lowest)), x.extents


@pads("_softmax_backward_data.default", "_log_softmax_backward_data.default")
def softmax_backward(call: PaddedCall) -> Placed:
    grad, output = call["grad_output"], call["output"]
    over = call.axes("output", "dim")
    result = call.run(grad_output=grad.masked(over), output=output.masked(over))
    return result, call.need_agreeing(grad.extents, output.extents)


def _normalised(call: PaddedCall) -> int:
    """Returns the number of outer dimensions; the inner ones have to be whole."""
    ndim = call["input"].ndim
    outer = ndim - len(call.value("normalized_shape"))
    call.need_whole("input", range(outer, ndim))
    call.need_whole("weight")
    return outer


@pads("native_layer_norm.default")
def layer_norm(call: PaddedCall) -> Placed:
    x, outer = call["input"], _normalised(call)
    kept = x.without(range(outer, x.ndim), keepdim=True)
    return call.run(), (x.extents, kept, kept)


@pads("_fused_rms_norm.default")
def rms_norm(call: PaddedCall) -> Placed:
    x, outer = call["input"], _normalised(call)
    return call.run(), (x.extents, x.without(range(outer, x.ndim), keepdim=True))


@pads("native_layer_norm_backward.default", "_fused_rms_norm_backward.default")
def layer_norm_backward(call: PaddedCall) -> Placed:
    """Gradients of the weights are sums over the outer dimensions."""
    x, outer = call["input"], _normalised(call)
    names = [n for n in ("grad_out", "input", "mean", "rstd") if call.get(n) is not None]
    for name in names:
        call.need_agreeing(x.extents, call[name].extents)
    masked = {name: call[name].masked(range(outer)) for name in names}
    inner = x.extents[outer:]
    asked = call.value("output_mask")
    results = (x.extents, inner, inner)
    placed = tuple(e if m else () for e, m in zip(results, asked, strict=False))
    return call.run(**masked), placed

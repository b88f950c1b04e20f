"""Convolutions, pooling and batch norm of any number of images."""

from dynamo_backends.xla.lowering.padded.call import PaddedCall, Placed
from dynamo_backends.xla.lowering.padded.extents import Extents
from dynamo_backends.xla.lowering.padded.registry import pads


def _whole_but_batch(call: PaddedCall, *names: str) -> None:
    """Refuses images whose channels or sizes vary."""
    for name in names:
        ndim = call[name].ndim
        batched = ndim == call["weight"].ndim
        call.need_whole(name, range(1 if batched else 0, ndim))


def _rest(call: PaddedCall, leading: Extents, index: int | None = None) -> Extents:
    return (*leading, *call.fresh(index)[len(leading) :])


@pads("convolution.default", "_convolution.default")
def convolution(call: PaddedCall) -> Placed:
    _whole_but_batch(call, "input")
    call.need_whole("weight")
    return call.run(), _rest(call, call["input"].extents[:1])


@pads("convolution_backward.default")
def convolution_backward(call: PaddedCall) -> Placed:
    """Gradients of weight and bias are sums over the images."""
    _whole_but_batch(call, "grad_output", "input")
    call.need_whole("weight")
    grad, x = call["grad_output"], call["input"]
    if grad.extents[0] != x.extents[0]:
        raise call.refuse("the gradient is padded otherwise than the input")
    result = call.run(grad_output=grad.masked([0]), input=x.masked([0]))
    asked = call.value("output_mask")
    placed = (x.extents, call["weight"].extents, call.fresh(2) if asked[2] else ())
    return result, tuple(e if m else () for e, m in zip(placed, asked, strict=True))


_POOLS = (
    "avg_pool{}d.default",
    "_adaptive_avg_pool{}d.default",
    "max_pool{}d_with_indices.default",
)


@pads(*(name.format(n) for name in _POOLS for n in (2, 3)))
def pool(call: PaddedCall) -> Placed:
    x = call["self"]
    spatial = 2 if "pool2d" in str(call.node.target) else 3
    leading = x.extents[: x.ndim - spatial]
    call.need_whole("self", range(x.ndim - spatial, x.ndim))
    result = call.run()
    if not isinstance(result, tuple):
        return result, _rest(call, leading)
    return result, tuple(_rest(call, leading, i) for i in range(len(result)))


@pads("_native_batch_norm_legit_no_training.default")
def batch_norm(call: PaddedCall) -> Placed:
    """With running statistics: elementwise."""
    x = call["input"]
    call.need_whole("input", [1])
    return call.run(), (x.extents, call.fresh(1), call.fresh(2))


@pads(
    "avg_pool2d_backward.default",
    "avg_pool3d_backward.default",
    "_adaptive_avg_pool2d_backward.default",
    "_adaptive_avg_pool3d_backward.default",
)
def average_backward(call: PaddedCall) -> Placed:
    grad, x = call["grad_output"], call["self"]
    spatial = 2 if "pool2d" in str(call.node.target) else 3
    for operand in ("grad_output", "self"):
        call.need_whole(operand, range(x.ndim - spatial, x.ndim))
    if grad.extents[: x.ndim - spatial] != x.extents[: x.ndim - spatial]:
        raise call.refuse("the gradient is padded otherwise than the input")
    return call.run(), x.extents


@pads("native_group_norm.default", shapes=("N",))
def group_norm(call: PaddedCall) -> Placed:
    x = call["input"]
    call.need_whole("input", range(1, x.ndim))
    statistics = (x.extents[0], *call.fresh(1)[1:])
    return call.run(), (x.extents, statistics, statistics)

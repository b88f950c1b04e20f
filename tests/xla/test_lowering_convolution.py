"""Convolution and its gradients, and the layout of a convolutional network."""

import jax
import pytest
import torch
import torch.nn.functional as F

from dynamo_backends.xla.lowering.context import LoweringOptions
from dynamo_backends.xla.lowering.interpreter import GraphLowering
from tests.xla.harness import capture, tensor_to_numpy
from tests.xla.lowering_checks import assert_like_eager, gradient

CASES = [(1, 0, 1, 1), (2, 1, 1, 1), (1, 1, 2, 2), (3, 0, 1, 4), (1, 2, 2, 1)]


def data(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("stride", "padding", "dilation", "groups"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolution(stride, padding, dilation, groups, dtype):
    x, w, b = data(2, 4, 9, 8), data(8, 4 // groups, 3, 3), data(8)

    def fn(x, w, b):
        return F.conv2d(x, w, b, stride, padding, dilation, groups)

    assert_like_eager(fn, *(t.to(dtype) for t in (x, w, b)))
    assert_like_eager(gradient(fn), *(t.to(dtype) for t in (x, w, b)))


@pytest.mark.parametrize(
    ("stride", "padding", "output_padding", "dilation", "groups"),
    [
        (2, 1, 1, 1, 1),
        (1, 1, 2, 3, 1),  # output padding beyond the stride
        (3, 0, 2, 1, 2),
        (2, 2, 1, 2, 2),
    ],
)
def test_transposed(stride, padding, output_padding, dilation, groups):
    def fn(x, w, b):
        return F.conv_transpose2d(x, w, b, stride, padding, output_padding, groups, dilation)

    tensors = data(2, 4, 6, 5), data(4, 6 // groups, 3, 3), data(6)
    assert_like_eager(fn, *tensors)
    assert_like_eager(gradient(fn), *tensors)


def test_other_ranks_and_unbatched():
    assert_like_eager(lambda x, w: F.conv1d(x, w, padding="same"), data(2, 4, 9), data(3, 4, 3))
    assert_like_eager(F.conv3d, data(1, 2, 5, 4, 6), data(3, 2, 2, 3, 2))
    assert_like_eager(F.conv2d, data(4, 9, 8), data(8, 4, 3, 3))
    assert_like_eager(F.conv2d, data(0, 4, 9, 8), data(8, 4, 3, 3))


def _network(x, w1, w2, w3):
    x = F.max_pool2d(F.relu(F.conv2d(x, w1, padding=1)), 3, 2, 1)
    y = F.conv2d(x, w2, padding=1) + x
    z = torch.cat([y, F.avg_pool2d(F.pad(y, (1, 0, 1, 0)), 2, 1)], 1)
    left, right = z.chunk(2, 1)
    z = F.conv2d(left * right[:, :, :, ::1].sigmoid(), w3)
    z = torch.ops.aten.upsample_nearest2d(z, (16, 16))
    return torch.ops.aten._adaptive_avg_pool2d(z, (1, 1)).flatten(1)


WEIGHTS = data(8, 3, 3, 3), data(8, 8, 3, 3), data(5, 8, 1, 1)


def test_network_values():
    assert_like_eager(_network, data(2, 3, 16, 16), *WEIGHTS)


def test_an_image_is_transposed_once():
    """From the input to the pooled features nothing but weights changes its layout."""
    gm, tensors = capture(_network, data(2, 3, 16, 16), *WEIGHTS)

    def traced(*arrays):
        return GraphLowering(gm.graph, LoweringOptions())(arrays)

    with jax.enable_x64(True):
        jaxpr = jax.make_jaxpr(traced)(*(tensor_to_numpy(t) for t in tensors))
    images = [
        e.invars[0].aval.shape
        for e in jaxpr.eqns
        if e.primitive.name == "transpose" and e.invars[0].aval.shape[0] == 2
    ]
    assert [s for s in images if s[-2:] != (1, 1) and s[1:3] != (1, 1)] == [(2, 3, 16, 16)]

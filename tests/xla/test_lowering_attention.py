"""Fused attention, forward and backward, against eager."""

import pytest
import torch
import torch.nn.functional as F

from dynamo_backends.xla.lowering import registry
from tests.xla.harness import capture, run
from tests.xla.lowering_checks import assert_like_eager, gradient

aten = torch.ops.aten


def data(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


Q, K, V = data(2, 3, 7, 8), data(2, 3, 9, 8), data(2, 3, 9, 8) + 1
MASKS = {
    "none": None,
    "additive": data(7, 9),
    "boolean": data(2, 1, 7, 9) > 0,
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention(mask, scale, dtype):
    def fn(q, k, v, *bias):
        return F.scaled_dot_product_attention(q, k, v, *bias, scale=scale)

    tensors = [t.to(dtype) for t in (Q, K, V)]
    bias = MASKS[mask]
    if bias is not None:
        tensors.append(bias.to(dtype) if bias.is_floating_point() else bias)
    assert_like_eager(fn, *tensors)
    assert_like_eager(gradient(fn), *tensors)


def test_causal():
    def fn(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    assert_like_eager(fn, Q, K, V)
    assert_like_eager(gradient(fn), Q, K, V)


def test_grouped_queries():
    def fn(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    q, k, v = data(2, 4, 7, 8), data(2, 2, 9, 8), data(2, 2, 9, 8)
    assert_like_eager(fn, q, k, v)
    assert_like_eager(gradient(fn), q, k, v)


def test_large_scores_do_not_overflow():
    assert_like_eager(F.scaled_dot_product_attention, Q * 1000, K, V)


def test_logsumexp():
    op = aten._scaled_dot_product_flash_attention_for_cpu
    assert_like_eager(lambda q, k, v: op(q, k, v)[1], Q, K, V)


def test_the_gradient_of_the_mask():
    """The memory-efficient operator's backward, which eager runs on CUDA only."""
    bias = data(1, 3, 7, 9)
    grad = data(2, 3, 7, 8)

    def reference(q, k, v, bias):
        scores = q @ k.mT / 8**0.5 + bias
        return scores.softmax(-1) @ v

    def lowered(q, k, v, bias, grad):
        scores = q @ k.mT / 8**0.5 + bias
        out, total = scores.softmax(-1) @ v, scores.logsumexp(-1)
        padded = F.pad(total, (0, 25))  # as the CUDA kernel leaves it
        zero = torch.zeros((), dtype=torch.int64)
        op = aten._scaled_dot_product_efficient_attention_backward
        return op(grad, q, k, v, bias, out, padded, zero, zero, 0.0, [True] * 4)

    expected = torch.func.vjp(reference, Q, K, V, bias)[1](grad)
    results = run(lowered, Q, K, V, bias, grad)
    for result, exact in zip(results, expected, strict=True):
        torch.testing.assert_close(result, exact)


def test_dropout_is_refused():
    op = aten._scaled_dot_product_efficient_attention
    gm, _ = capture(lambda q, k, v: op(q, k, v, None, False, 0.5)[0], Q, K, V)
    node = next(n for n in gm.graph.nodes if n.target is op.default)
    lowering = registry.lookup(node.target)
    assert lowering.when(node) == "attention with dropout draws random numbers"

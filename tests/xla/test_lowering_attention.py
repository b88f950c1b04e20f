"""Fused attention, forward and backward, against eager."""

from collections.abc import Callable

import jax
import pytest
import torch
import torch.nn.functional as F

from dynamo_backends.xla.arrays import tensor_to_numpy
from dynamo_backends.xla.lowering import registry
from dynamo_backends.xla.lowering.context import LoweringOptions
from dynamo_backends.xla.lowering.interpreter import GraphLowering
from dynamo_backends.xla.lowering.values import to_logical_array
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


LENGTHS = {"longer": (700, 300), "shorter": (300, 700), "in blocks of 256": (1300, 1300)}
SEEN = {
    "all": lambda length, size: None,
    "causal": lambda length, size: "causal",
    "boolean": lambda length, size: data(length, size) > 0,
    "of keys": lambda length, size: data(2, 1, 1, size),
    "some see nothing": lambda length, size: torch.arange(length)[:, None] % 3 > 0,
}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("seen", SEEN)
def test_many_queries_are_computed_in_blocks(lengths: str, seen: str):
    length, size = LENGTHS[lengths]
    mask = SEEN[seen](length, size)
    tensors = [data(2, 1, length, 8), data(2, 1, size, 8), data(2, 1, size, 8) + 1]
    if isinstance(mask, torch.Tensor):
        tensors.append(mask)

    def fn(q, k, v, *bias):
        return F.scaled_dot_product_attention(q, k, v, *bias, is_causal=mask == "causal")

    assert_like_eager(fn, *tensors)


def products(fn: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> list[int]:
    """How many numbers each product gives."""
    gm, _ = capture(fn, *tensors)
    lower = GraphLowering(gm.graph, LoweringOptions())
    program = jax.make_jaxpr(lambda *arrays: [to_logical_array(x) for x in lower(arrays)])(
        *map(tensor_to_numpy, tensors)
    )
    return [e.outvars[0].aval.size for e in program.eqns if e.primitive.name == "dot_general"]


def test_keys_that_no_query_of_a_block_sees_are_not_read():
    tensors = [data(1, 1, 1024, 8)] * 3
    everything = 2 * 1024 * 1024

    def count(fn: Callable[..., torch.Tensor]) -> int:
        return sum(size for size in products(fn, *tensors) if size > 1024 * 8)

    assert count(F.scaled_dot_product_attention) == everything // 2
    causal = count(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert causal == everything // 2 * 5 // 8
    whole = count(lambda q, k, v: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[1])
    assert whole == everything // 2


def test_totals_of_few_rows_change_nothing():
    """They are compared with the result, whose numbers may be anything."""
    values = torch.tensor([0.0, 1e-30, -3.0, 5.0, float("inf"), float("-inf"), float("nan")])
    v = values.repeat(9, 1)[None, None]
    mask = torch.ones(7, 9, dtype=torch.bool)
    mask[3, :4] = False
    assert_like_eager(lambda *args: F.scaled_dot_product_attention(*args), Q, K, v[..., :4], mask)
    assert_like_eager(F.scaled_dot_product_attention, Q[:1, :1], K[:1, :1], v)


def test_dropout_is_refused():
    op = aten._scaled_dot_product_efficient_attention
    gm, _ = capture(lambda q, k, v: op(q, k, v, None, False, 0.5)[0], Q, K, V)
    node = next(n for n in gm.graph.nodes if n.target is op.default)
    lowering = registry.lookup(node.target)
    assert lowering.when(node) == "attention with dropout draws random numbers"

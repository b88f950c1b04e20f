"""Operators that are decomposed by rules of our own."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.graph.decomposition_tables import (
    all_decomposition_rules,
    clamp,
    frac,
    softmax_backward,
)
from dynamo_backends.torchscript.backend import whole_operators
from dynamo_backends.verify import describe_difference, widen_to_float64

backward = torch.ops.aten._softmax_backward_data.default


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_the_gradient_of_softmax_is_eagers(dtype: torch.dtype, dim: int):
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(5, 7, generator=generator).to(dtype)
    output = torch.randn(5, 7, generator=generator).softmax(dim).to(dtype)
    precise = backward(widen_to_float64(grad), widen_to_float64(output), dim, torch.float64)
    found = softmax_backward(grad, output, dim, dtype)
    assert describe_difference([backward(grad, output, dim, dtype)], [found], [precise]) is None


def test_an_infinite_result_of_softmax_has_an_infinite_gradient():
    grad = torch.tensor([0.5, 1.0, -2.0])
    output = torch.tensor([float("inf"), 0.1, 0.2])
    expected = backward(grad, output, 0, torch.float32)
    assert torch.equal(softmax_backward(grad, output, 0, torch.float32).isnan(), expected.isnan())
    assert not expected.isnan().all()


@pytest.mark.parametrize("op", [torch.ops.aten.minimum.default, torch.ops.aten.maximum.default])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_the_smaller_and_the_larger_of_two(op: OpOverload, dtype: torch.dtype):
    values = [1.0, -2.0, 3.0, 0.0]
    if dtype.is_floating_point:
        values += [float("nan"), float("inf"), -float("inf")]
    x = torch.tensor(values, dtype=dtype)
    found = all_decomposition_rules()[op](x.unsqueeze(1), x)
    torch.testing.assert_close(found, op(x.unsqueeze(1), x), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("clamp", (-1, 2)), ("clamp", (None, 1.5)), ("clamp", (0,)), ("clamp", (2, -1)),
        ("clamp_min", (0.5,)), ("clamp_max", (-1,)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int8])
def test_bounds(name: str, bounds: tuple[Any, ...], dtype: torch.dtype):
    values = [1.0, -2.0, 3.0, 0.0]
    if dtype.is_floating_point:
        values += [-0.0, float("nan"), float("inf"), -float("inf")]
    x = torch.tensor(values, dtype=dtype)
    op = getattr(torch.ops.aten, name).default
    found, expected = all_decomposition_rules()[op](x, *bounds), op(x, *bounds)
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=0, atol=0)


def test_a_bound_that_is_nan():
    x = torch.tensor([1.0, float("inf"), float("nan")])
    assert clamp(x, float("nan")).isnan().all()
    if not torch.__version__.startswith("2.11."):  # whose eager ignores such a bound
        assert x.clamp(min=float("nan")).isnan().all()


def test_the_sign_of_a_zero_of_frac_is_eagers():
    x = torch.tensor([-0.0, 0.0, -2.0, 2.5, -2.5, float("inf"), float("nan")])
    torch.testing.assert_close(frac(x), x.frac(), equal_nan=True)
    assert torch.equal(frac(x)[:5].signbit(), x.frac()[:5].signbit())


attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (4, 2)])
@pytest.mark.parametrize("kind", ["plain", "causal", "masked", "hidden", "scaled"])
def test_attention_and_its_gradients_are_eagers(
    dtype: torch.dtype, heads: int, shared: int, kind: str
):
    generator = torch.Generator().manual_seed(0)

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(dtype)

    query, key, value = drawn(2, heads, 7, 8), drawn(2, shared, 9, 8), drawn(2, shared, 9, 8)
    mask = drawn(2, 1, 7, 9) if kind in ("masked", "hidden") else None
    if kind == "hidden" and mask is not None:
        mask[0, :, :2] = -float("inf")
        mask[1, :, :, :3] = -float("inf")
    scale = 0.3 if kind == "scaled" else None
    grad = drawn(2, heads, 7, 8)

    def results(rules: Mapping[Any, Callable[..., Any]], *tensors: torch.Tensor) -> list[Any]:
        forward, backward = (rules.get(op, op) for op in (attention, attention_backward))
        grad, query, key, value = tensors
        wanted = {"scale": scale, "attn_mask": None if mask is None else mask.to(query.dtype)}
        saved = forward(query, key, value, 0.0, kind == "causal", **wanted)
        found = backward(grad, query, key, value, *saved, 0.0, kind == "causal", **wanted)
        return [*saved, *found]

    given = (grad, query, key, value)
    expected = results({}, *given)
    found = results(all_decomposition_rules(), *given)
    precise = results({}, *map(widen_to_float64, given))
    assert describe_difference(expected, found, precise) is None
    strides = [[x.stride() for x in (values[0], *values[2:])] for values in (found, expected)]
    assert strides[0] == strides[1]
    assert [g.dtype for g in found] == [g.dtype for g in expected]


efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("queries", [5, 64])
@pytest.mark.parametrize("kind", ["plain", "causal", "masked"])
def test_attention_of_gpus(gradients: bool, queries: int, kind: str):
    """Its kernel is one for GPUs; what it is to compute is known on CPUs, too."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, rows, 3, 8, generator=generator).transpose(1, 2) for rows in (queries, 9, 9)
    )
    mask = torch.randn(2, 1, queries, 9, generator=generator) if kind == "masked" else None
    causal = kind == "causal"

    def results(rule: Callable[..., Any], *tensors: torch.Tensor | None) -> Any:
        return rule(*tensors, gradients, 0.0, causal)

    found = results(all_decomposition_rules()[efficient], query, key, value, mask)
    kinds = results(
        efficient, *(None if x is None else x.to("meta") for x in (query, key, value, mask))
    )
    for one, kind_of_one in zip(found, kinds, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (
            kind_of_one.shape, kind_of_one.stride(), kind_of_one.dtype)  # fmt: skip
    bias = None if mask is None else mask.expand(2, 3, queries, 9)
    wanted, log_sum = attention(query, key, value, 0.0, causal, attn_mask=bias)
    torch.testing.assert_close(found[0], wanted)
    if gradients:
        torch.testing.assert_close(found[1][..., :queries], log_sum)


def test_backends_that_call_torchs_kernels_keep_attention_whole():
    assert {attention, efficient} <= whole_operators()


def test_attention_of_gpus_with_dropout_stays_whole():
    x = torch.ones(1, 1, 2, 4)
    assert all_decomposition_rules()[efficient](x, x, x, None, False, 0.5) is NotImplemented

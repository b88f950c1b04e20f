"""What a tensor is filled with is a number of the graph, and no tensor of the host."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from dynamo_backends.graph.normalize import NormalizedGraph, normalize

aten = torch.ops.aten


def normalized(fn: Callable[..., Any], x: Tensor) -> NormalizedGraph:
    functional = torch.func.functionalize(fn, remove="mutations")
    module: fx.GraphModule = make_fx(functional, tracing_mode="fake")(x)
    return normalize(module, "inference", freeze=True)


@pytest.mark.parametrize(("dtype", "number"), [(torch.float32, 0.1), (torch.int64, 2**40 + 1)])
def test_a_literal_becomes_a_number(dtype: torch.dtype, number: float):
    def fn(x: Tensor) -> tuple[Tensor]:
        x = x.clone()
        x[0] = number
        return (x,)

    x = torch.zeros(3, 2, dtype=dtype)
    found = normalized(fn, x)
    assert found.constants == ()
    targets = [call.target for call in found.graph.calls]
    assert aten.fill.Scalar in targets
    assert aten.lift_fresh_copy.default not in targets
    assert torch.equal(found.graph.module(x)[0], fn(x)[0])


def test_a_literal_that_is_read_otherwise_stays_a_tensor():
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        five = torch.tensor(5.0)
        y = x.clone()
        y[0] = five
        return y, five * x

    x = torch.zeros(3, 2)
    found = normalized(fn, x)
    assert [float(c) for c in found.constants] == [5.0]
    for got, want in zip(found.graph.module(x, *found.constants), fn(x), strict=True):
        assert torch.equal(got, want)

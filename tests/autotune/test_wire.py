"""Graphs survive the way to another process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from dynamo_backends.autotune import serialization


def _layers(x: Tensor) -> Tensor:
    y = F.conv2d(x, x.new_ones(2, 3, 3, 3), padding=1).relu()
    y = F.scaled_dot_product_attention(y, y, y, is_causal=True)
    return F.gelu(y, approximate="tanh")[:, 0, ..., 1::2].to(torch.float64)


def _odds(x: Tensor) -> tuple[Tensor, ...]:
    a, b = x.chunk(2, dim=-1)
    y = x.masked_fill(x > 0.5, float("-inf")).softmax(-1)
    z = torch.ops.aten.add.Tensor(a, b, alpha=2)
    full = torch.full((2,), 3, dtype=torch.int32, device="cpu")
    return y, z, full, x.to(memory_format=torch.channels_last), torch.einsum("abcd->ab", x)


def captured(fn: Callable[..., Any], *args: Tensor) -> tuple[fx.GraphModule, list[Any]]:
    found: list[tuple[fx.GraphModule, list[Any]]] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        found.append((gm, inputs))
        return gm.forward

    torch.compile(fn, backend=backend)(*args)
    (one,) = found
    return one


@pytest.mark.parametrize("fn", [_layers, _odds])
def test_a_graph_and_its_inputs_are_read_as_written(fn: Callable[..., Any], tmp_path: Path):
    graph, values = captured(fn, torch.rand(2, 3, 4, 4))
    serialization.write(tmp_path, graph, values)
    again, read = serialization.read(tmp_path)
    assert torch.equal(read[0], values[0])
    for ours, theirs in zip(again(*read), graph(*values), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        assert ours.stride() == theirs.stride()


def test_shared_memory_and_gradients_are_kept(tmp_path: Path):
    x = torch.rand(4, 6)
    model = nn.Linear(6, 2)
    graph, _ = captured(lambda a, b: model(a + b), x, x[:2].repeat(2, 1))
    values = [x, x[1:], model.weight, 3]
    serialization.write(tmp_path, graph, values)
    _, (a, b, weight, number) = serialization.read(tmp_path)
    assert b.data_ptr() == a[1:].data_ptr()
    assert weight.requires_grad
    assert number == 3


def test_what_cannot_be_written_is_told(tmp_path: Path):
    def fn(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    graph, values = captured(fn, torch.rand(3))
    with pytest.raises(
        serialization.GraphNotSerializableError, match=r"contains a subgraph|calls cond"
    ):
        serialization.write(tmp_path, graph, values)


def test_nothing_is_pickled(tmp_path: Path):
    graph, values = captured(_odds, torch.rand(2, 3, 4, 4))
    serialization.write(tmp_path, graph, values)
    torch.load(tmp_path / "tensors.pt", weights_only=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["graph.json", "tensors.pt"]

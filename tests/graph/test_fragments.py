"""When a partition costs more than it saves."""

import operator

import pytest
import torch
from torch import Tensor, fx

from dynamo_backends.graph.graph import Graph, Input, Role
from dynamo_backends.graph.partition import (
    BLOCK_COST,
    MANY_BLOCKS,
    estimate_operator_cost,
    fragmentation_reason,
    partition,
)

aten = torch.ops.aten


def chain(blocks: int, size: int, elements: int) -> Graph:
    """A graph of `blocks` times `size` sines, with a cosine between them."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = torch.empty(elements)
    for i in range(blocks):
        for target in [*[aten.sin.default] * size, *[aten.cos.default] * (i + 1 < blocks)]:
            node = graph.call_function(target, (node,))
            node.meta["val"] = torch.empty(elements)
    graph.output((node,))
    return Graph(fx.GraphModule({}, graph), "inference", (Input("x", Role.ACTIVATION),))


def verdict(blocks: int, size: int, elements: int = 4) -> str | None:
    graph = chain(blocks, size, elements)
    split = partition(graph, {n: "no" for n in graph.calls if n.target is aten.cos.default}, 1)
    assert sum(part.on_backend for part in split.parts) == blocks
    return fragmentation_reason(split)


def test_many_small_blocks_are_fragments():
    assert str(verdict(12, 3)).startswith("12 blocks of 3 operators on average")
    assert verdict(MANY_BLOCKS - 1, 3) is None
    assert verdict(MANY_BLOCKS, 3) is not None


def test_enough_work_in_a_block_pays_for_it():
    assert verdict(8, int(BLOCK_COST)) is None
    assert verdict(8, int(BLOCK_COST) - 1) is not None
    assert verdict(8, 3, elements=64 * 1024) is None, "256 KiB written by each of three operators"


@pytest.mark.parametrize(
    ("target", "value", "work"),
    [
        (aten.sin.default, torch.empty(4), 1.0),
        (aten.sin.default, torch.empty(32 * 1024), 3.0),
        (aten.view.default, torch.empty(32 * 1024), 1.0),
        (aten.mm.default, torch.empty(2, 2), BLOCK_COST),
        (aten.convolution.default, torch.empty(1, 1, 2, 2), BLOCK_COST),
        (aten.max.dim, (torch.empty(16 * 1024), torch.empty(8 * 1024, dtype=torch.int64)), 3.0),
        (operator.getitem, torch.empty(32 * 1024), 0.0),
    ],
)
def test_what_a_call_costs(target: object, value: Tensor, work: float):
    node = fx.Graph().call_function(target, ())  # type: ignore[arg-type]
    node.meta["val"] = value
    assert estimate_operator_cost(node) == pytest.approx(work, abs=1e-3)

"""What a trial calls as precise as eager."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from dynamo_backends.graph.graph import Graph, Input, Role
from dynamo_backends.toolkit.trials import judge

aten = torch.ops.aten


def call_of(target: Any, *values: Tensor) -> Graph:
    graph = fx.Graph()
    places = [graph.placeholder(f"x{i}") for i in range(len(values))]
    graph.output((graph.call_function(target, tuple(places)),))
    inputs = tuple(Input(place.name, Role.ACTIVATION) for place in places)
    return Graph(fx.GraphModule(nn.Module(), graph), "inference", inputs)


@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e3])
def test_the_size_of_products_does_not_matter(scale: float) -> None:
    """An error of 3e-6 of the largest is that of another algorithm, one of 1e-3 is wrong."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 64, generator=generator) * scale for _ in range(2))
    graph = call_of(aten.mm.default, a, b)
    noise = torch.randn(64, 64, generator=generator) * (a @ b).abs().max()
    for error, refused in ((3e-6, False), (1e-3, True)):
        wrong = judge(graph, lambda args, e=error: [args[0] @ args[1] + e * noise], [a, b])
        assert (wrong is not None) == refused, wrong


def test_each_element_of_an_elementwise_call_counts() -> None:
    x = torch.tensor([1e-3, 1.0, 1e6])
    graph = call_of(aten.mul.Tensor, x, x)
    assert judge(graph, lambda args: [args[0] * args[1]], [x, x]) is None
    wrong = judge(graph, lambda args: [args[0] * args[1] + torch.tensor([0, 0.01, 0])], [x, x])
    assert wrong is not None


def test_infinities_and_other_types_are_compared_as_they_are() -> None:
    x = torch.tensor([[1.0, float("inf")], [float("nan"), 5e4]])
    graph = call_of(aten.t.default, x)
    assert judge(graph, lambda args: [args[0].t()], [x]) is None
    assert judge(graph, lambda args: [args[0].t().nan_to_num(0.0)], [x]) is not None
    assert judge(graph, lambda args: [args[0].t().half()], [x]) is not None
    for other in (torch.tensor([[3, 100]]), torch.tensor([[True, False]])):
        graph = call_of(aten.t.default, other)
        assert judge(graph, lambda args: [args[0].t()], [other]) is None
        assert judge(graph, lambda args: [args[0].t() ^ 1], [other]) is not None


def test_memory_that_nobody_wrote_has_no_contents() -> None:
    graph = call_of(aten.empty_like.default, torch.ones(3))
    assert judge(graph, lambda args: [torch.full((3,), 7.0)], [torch.ones(3)]) is None
    assert judge(graph, lambda args: [torch.ones(4)], [torch.ones(3)]) is not None
    assert judge(graph, lambda args: [torch.ones(3).half()], [torch.ones(3)]) is not None

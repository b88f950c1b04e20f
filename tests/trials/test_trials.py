"""What a trial calls as precise as eager."""

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from dynamo_backends._torch_private import FakeTensorMode
from dynamo_backends.graph.graph import Graph, Input, Role
from dynamo_backends.verify.trials.call_trials import (
    LARGE,
    count_elements,
    is_run_in_trial,
    shrink_call,
    used_result_indices,
)
from dynamo_backends.verify.trials.judge import Judge

aten = torch.ops.aten


def call_of(target: Any, *values: Tensor) -> Graph:
    graph = fx.Graph()
    places = [graph.placeholder(f"x{i}") for i in range(len(values))]
    node = graph.call_function(target, tuple(places))
    node.meta["val"] = target(*values)
    graph.output((node,))
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
        wrong = Judge(graph)(lambda args, e=error: [args[0] @ args[1] + e * noise], [a, b])
        assert (wrong is not None) == refused, wrong


def test_each_element_of_an_elementwise_call_counts() -> None:
    x = torch.tensor([1e-3, 1.0, 1e6])
    graph = call_of(aten.mul.Tensor, x, x)
    assert Judge(graph)(lambda args: [args[0] * args[1]], [x, x]) is None
    wrong = Judge(graph)(lambda args: [args[0] * args[1] + torch.tensor([0, 0.01, 0])], [x, x])
    assert wrong is not None


def test_infinities_and_other_types_are_compared_as_they_are() -> None:
    x = torch.tensor([[1.0, float("inf")], [float("nan"), 5e4]])
    graph = call_of(aten.t.default, x)
    assert Judge(graph)(lambda args: [args[0].t()], [x]) is None
    assert Judge(graph)(lambda args: [args[0].t().nan_to_num(0.0)], [x]) is not None
    assert Judge(graph)(lambda args: [args[0].t().half()], [x]) is not None
    for other in (torch.tensor([[3, 100]]), torch.tensor([[True, False]])):
        graph = call_of(aten.t.default, other)
        assert Judge(graph)(lambda args: [args[0].t()], [other]) is None
        assert Judge(graph)(lambda args: [args[0].t() ^ 1], [other]) is not None


def test_memory_that_nobody_wrote_has_no_contents() -> None:
    graph = call_of(aten.empty_like.default, torch.ones(3))
    assert Judge(graph)(lambda args: [torch.full((3,), 7.0)], [torch.ones(3)]) is None
    assert Judge(graph)(lambda args: [torch.ones(4)], [torch.ones(3)]) is not None
    assert Judge(graph)(lambda args: [torch.ones(3).half()], [torch.ones(3)]) is not None


def fake_call(target: Any, *args: Any, read: tuple[int, ...] = ()) -> fx.Node:
    """A call on fake tensors, some of whose results are read."""
    graph = fx.Graph()
    with FakeTensorMode():
        values = [torch.empty_strided(x.shape, x.stride(), device="cpu") if isinstance(x, Tensor)
                  else x for x in args]  # fmt: skip
        result = target(*values)
    places = [graph.placeholder(f"x{i}") if isinstance(v, Tensor) else v
              for i, v in enumerate(values)]  # fmt: skip
    for place, value in zip(places, values, strict=True):
        if isinstance(place, fx.Node):
            place.meta["val"] = value
    node = graph.call_function(target, tuple(places))
    node.meta["val"] = result
    for index in read:
        graph.call_function(operator.getitem, (node, index)).meta["val"] = result[index]
    return node


def shapes(node: fx.Node) -> list[list[int]]:
    return [list(n.meta["val"].shape) for n in node.all_input_nodes]


def meta(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def test_large_elementwise_calls_are_tried_on_fewer_elements() -> None:
    images = meta(8, 64, 100, 100).to(memory_format=torch.channels_last)
    node = fake_call(aten.mul.Tensor, images, meta(64, 1, 1))
    found = shrink_call(node)
    assert shapes(found) == [[8, 16, 16, 16], [16, 1, 1]]
    assert found.args[0].meta["val"].is_contiguous(memory_format=torch.channels_last)
    assert found.meta["val"].stride() == found.args[0].meta["val"].stride()
    assert count_elements(found) < LARGE < count_elements(node)
    assert (found.target, is_run_in_trial(found)) == (node.target, True)


@pytest.mark.parametrize("channels", [16, 8])
def test_other_large_calls_are_tried_on_a_part_of_the_batch(channels: int) -> None:
    """Also where weights have as many rows as the batch."""
    weights = [meta(channels) for _ in range(4)]
    op = aten._native_batch_norm_legit_functional.default
    node = fake_call(op, meta(8, channels, 96, 96), *weights, True, 0.1, 1e-5, read=(0, 3))
    found = shrink_call(node)
    assert shapes(found) == [[2, channels, 96, 96], *([channels],) * 4]
    assert used_result_indices(found) == [0, 3]
    assert list(found.meta["val"][0].shape) == [2, channels, 96, 96]
    assert is_run_in_trial(found)


@pytest.mark.parametrize(
    ("target", "arguments", "results"),
    [(aten.unbind.int, (), 3), (aten.split.Tensor, (1,), 3), (aten.split_with_sizes.default,
     ([1, 2],), 2)],
)  # fmt: skip
def test_what_splits_its_rows_is_tried_on_as_many(
    target: Any, arguments: tuple[Any, ...], results: int
) -> None:
    node = fake_call(target, meta(3, 512, 1024), *arguments, read=tuple(range(results)))
    found = shrink_call(node)
    assert shapes(found) == [[3, 2, 1024]]
    assert used_result_indices(found) == list(range(results))
    assert is_run_in_trial(found)


@pytest.mark.parametrize(("index", "rows"), [(0, 2), (1, 2), (-2, 2), (2, 3), (-3, 3)])
def test_the_row_that_a_call_takes_is_there(index: int, rows: int) -> None:
    node = fake_call(aten.select.int, meta(3, 512, 1024), 0, index)
    assert shapes(shrink_call(node)) == [[rows, 512, 1024]]


def test_a_part_of_rows_is_not_tried_as_none() -> None:
    node = fake_call(aten.slice.Tensor, meta(600, 1024), 0, 100, 500)
    assert shrink_call(node) is node


def test_what_cannot_be_made_smaller_is_run_if_that_takes_no_gigabytes() -> None:
    node = fake_call(aten.view.default, meta(9, 1 << 20), [9 << 20])
    assert shrink_call(node) is node
    assert not is_run_in_trial(node)
    node = fake_call(aten.view.default, meta(4, 1 << 18), [1 << 20])
    assert is_run_in_trial(shrink_call(node))


def test_large_products_are_compiled_only() -> None:
    node = fake_call(aten.mm.default, meta(1024, 1024), meta(1024, 1024))
    assert shrink_call(node) is node
    assert not is_run_in_trial(node)

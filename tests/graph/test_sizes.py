"""Sizes that know where they come from, for backends that serve a range of shapes."""

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dynamo_backends import Availability, Backend, Executable, Options, Support
from dynamo_backends.graph.fingerprint import fingerprint
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.symbolic_sizes import (
    SIZES,
    SizeWithExpression,
    cap_sizes_at_current,
    has_size_expressions,
    size_ranges,
    sizes_of,
)
from dynamo_backends.pipeline.captured import compile_captured


class Eager(Executable):
    def __init__(self, graph: Graph):
        self._module = graph.module

    def bind(self, weights: Sequence[Tensor]) -> tuple[Any, Collection[int]]:
        return lambda values: list(self._module(*values)), ()


class Keeping(Backend):
    """Runs graphs with torch and keeps them."""

    name = "keeping"
    serves_ranges = True

    def __init__(self) -> None:
        self.graphs: list[Graph] = []

    def availability(self) -> Availability:
        return Availability(True, "")

    def supports(self, node: Any, options: Options) -> Support:
        return Support(True)

    def compile(self, graph: Graph, options: Options) -> Executable:
        self.graphs.append(graph)
        return Eager(graph)


def graphs_of(fn: Callable[..., Any], *inputs: Tensor, serves_ranges: bool = True) -> list[Graph]:
    """The graphs that a function becomes for one input after the other; results are checked."""
    backend = Keeping()
    backend.serves_ranges = serves_ranges  # type: ignore[misc]
    run = torch.compile(
        fn,
        backend=lambda gm, args: compile_captured(backend, gm, args, Options(cache=False)),
        dynamic=True,
    )
    for x in inputs:
        torch.testing.assert_close(run(x), fn(x))
    return backend.graphs


def kinds(graph: Graph) -> set[type]:
    """The types of all arguments of all calls."""
    found: list[Any] = []
    for node in graph.calls:
        torch.fx.node.map_aggregate((node.args, node.kwargs), lambda a: found.append(a) or a)
    return set(map(type, found))


def split(x: Tensor) -> Tensor:
    return x.view(x.shape[0], 2, -1).relu().sum(1)


def test_sizes_among_arguments_and_shapes():
    (graph,) = graphs_of(split, torch.randn(3, 8))
    assert has_size_expressions(graph.module.graph)
    assert SizeWithExpression in kinds(graph)
    view = next(n for n in graph.calls if "view" in str(n.target))
    batch = view.args[1][0]
    assert isinstance(batch, SizeWithExpression)
    assert batch == 3
    assert (batch.lower, batch.upper) == (2, None)
    assert sizes_of(view)[0].expression == batch.expression
    half = sizes_of(view)[2]
    assert isinstance(half, SizeWithExpression)
    assert (half, str(half.expression.func.__name__)) == (4, "FloorDiv")


def test_other_backends_get_plain_integers():
    (graph,) = graphs_of(split, torch.randn(3, 8), serves_ranges=False)
    assert not has_size_expressions(graph.module.graph)
    assert all(SIZES not in n.meta for n in graph.calls)
    assert SizeWithExpression not in kinds(graph)


def test_bounds_of_the_user():
    x = torch.randn(4, 3)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=32)
    backend = Keeping()
    run = torch.compile(
        lambda x: x * 2,
        backend=lambda gm, args: compile_captured(backend, gm, args, Options(cache=False)),
    )
    run(x)
    (size,) = [s for s in sizes_of(backend.graphs[0].calls[0]) if isinstance(s, SizeWithExpression)]
    assert (size.lower, size.upper) == (2, 32)


def test_ranges_are_those_that_the_user_gave_or_the_bounds():
    ranges, marks = [], []
    for most in (32, 64):
        x = torch.randn(4, 3)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=most)
        (graph,) = graphs_of(lambda x: torch.cat([x, x]) * 2, x)
        ranges.append(size_ranges(graph))
        marks.append(fingerprint(graph, ranged=True))
    assert ranges == [[(2, 32), (2, None), (4, 64)], [(2, 64), (2, None), (4, 128)]]
    assert len(set(marks)) == 1
    cap_sizes_at_current(graph)
    assert size_ranges(graph) == [(2, 4), (2, 3), (4, 8)]
    assert fingerprint(graph, ranged=True) == marks[0]


def test_numbers_are_plain():
    """A tensor of 64 bits would make a wider result of a narrow tensor without dimensions."""
    narrow = torch.arange(12, dtype=torch.int32).view(3, 4)
    (graph,) = graphs_of(lambda x: x.sum(dtype=torch.int32) * x.shape[0] + 1, narrow)
    (factor,) = [n.args[1] for n in graph.calls if n.target is torch.ops.aten.mul.Tensor]
    assert factor == 3
    assert type(factor) is int


def test_numbers_beside_floating_point_tensors_are_tensors():
    (graph,) = graphs_of(lambda x: (x / x.shape[0]).mean(0), torch.randn(3, 4))
    made = [n for n in graph.calls if n.target == torch.ops.aten.scalar_tensor.default]
    assert [int(n.args[0]) for n in made] == [3]
    assert isinstance(made[0].args[0], SizeWithExpression)


def test_equal_but_for_sizes():
    first, second = graphs_of(split, torch.randn(3, 8), torch.randn(5, 12))
    assert fingerprint(first) != fingerprint(second)
    assert fingerprint(first, ranged=True) == fingerprint(second, ranged=True)


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (lambda x: (x + 1).view(-1, 4).exp(), ((3, 4), (3, 8))),  # the first is no view at all
        (lambda x: x.sum(dtype=torch.int32) * x.shape[0], ((3, 4), (5, 4))),
    ],
    ids=["a view that changes nothing", "a size as a number"],
)
def test_graphs_that_differ_in_more_than_sizes(fn: Any, shapes: Any):
    first, second = graphs_of(fn, *(torch.randn(*s) for s in shapes))
    assert fingerprint(first, ranged=True) != fingerprint(second, ranged=True)


def test_a_size_is_an_integer():
    (graph,) = graphs_of(split, torch.randn(3, 8))
    size = next(s for n in graph.calls for s in sizes_of(n) if isinstance(s, SizeWithExpression))
    assert repr(size) == str(int(size))
    assert type(size + 1) is int
    twin = copy.deepcopy(size)
    assert (twin, twin.expression, twin.upper) == (size, size.expression, size.upper)


def test_what_is_not_known():
    (graph,) = graphs_of(split, torch.randn(3, 8))
    node = graph.calls[0]
    del node.meta[SIZES]
    assert sizes_of(node) == (None,) * node.meta["val"].ndim

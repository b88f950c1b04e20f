"""Partitions: no cycles, few blocks, random numbers in order, values equal to the whole graph."""

import operator

import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch import fx

from dynamo_backends.graph.graph import Graph, Input, Role
from dynamo_backends.graph.partition import PartitionedGraph, partition

aten = torch.ops.aten


def run(graph: Graph, split: PartitionedGraph, x: torch.Tensor) -> list[torch.Tensor]:
    """Runs the parts in order, with only the values that they were promised."""
    values = {p.name: x for p in graph.placeholders}
    for part in split.parts:
        results = part.graph.module(*[values[name] for name in part.reads])
        values.update(zip(part.writes, results, strict=True))
    return [values[n.name] for n in graph.outputs]


def build(edges: list[tuple[int, int]]) -> Graph:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3)
    nodes = [x]
    for a, b in edges:
        node = graph.call_function(
            aten.add.Tensor, (nodes[a % len(nodes)], nodes[b % len(nodes)]), {"alpha": 0.5}
        )
        node.meta["val"] = torch.empty(3)
        nodes.append(node)
    graph.output(tuple(nodes[1:][::3] + nodes[-1:]))
    return Graph(fx.GraphModule({}, graph), "inference", (Input("x", Role.ACTIVATION),))


pair = st.tuples(st.integers(0, 99), st.integers(0, 99))


@settings(deadline=None, max_examples=80, print_blob=True)
@given(st.lists(st.tuples(pair, st.booleans()), min_size=1, max_size=40), st.integers(1, 4))
def test_any_partition_computes_what_the_graph_computes(spec: list, minimum: int):
    graph = build([edge for edge, _ in spec])
    eager = {n for n, (_, yes) in zip(graph.calls, spec, strict=True) if not yes}
    split = partition(graph, dict.fromkeys(eager, "no"), minimum)
    note(f"{len(split.parts)} parts")
    x = torch.arange(3.0)
    torch.testing.assert_close(run(graph, split, x), list(graph.module(x)))
    inside = {n.name for p in split.parts if p.on_backend for n in p.graph.calls}
    assert not inside & {n.name for n in eager}
    if eager:
        assert all(len(p.graph.calls) >= minimum for p in split.parts if p.on_backend)


def test_a_whole_graph_is_one_block():
    graph = build([(0, 0), (1, 0), (2, 1)])
    split = partition(graph, {}, min_block_size=100)
    assert [p.on_backend for p in split.parts] == [True]


def test_independent_eager_nodes_do_not_split_blocks_more_than_needed():
    # x -> a (eager) -> b ; x -> c -> d: b, c and d need two blocks at most, not three
    graph = build([(0, 0), (1, 1), (0, 0), (3, 3)])
    split = partition(graph, {graph.calls[0]: "no"}, 1)
    assert len(split.parts) <= 3
    assert split.parts[0].on_backend is False, "what needs no block runs first"


def test_random_numbers_keep_their_order():
    graph = fx.Graph()
    x = graph.placeholder("x")
    late = graph.call_function(aten.add.Tensor, (x, x))
    first = graph.call_function(aten.bernoulli.default, (late,))
    second = graph.call_function(aten.rand.default, ([3],))
    graph.output((first, second))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(3)
    whole = Graph(fx.GraphModule({}, graph), "inference", (Input("x", Role.ACTIVATION),))
    random = (aten.bernoulli.default, aten.rand.default)
    split = partition(whole, {n: "random" for n in whole.calls if n.target in random}, 1)
    order = [n.target for p in split.parts for n in p.graph.calls if n.target in random]
    assert order == list(random)


def test_elements_of_a_tuple_follow_their_source():
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, indices = torch.max(x, 0)
        return values + 1, indices

    gm = torch.fx.experimental.proxy_tensor.make_fx(fn)(torch.randn(3, 4))
    graph = Graph(gm, "inference", (Input("x_1", Role.ACTIVATION),))
    largest = (aten.max.dim, operator.getitem)
    split = partition(graph, {n: "no" for n in graph.calls if n.target in largest}, 1)
    assert all(len(p.graph.module.graph.nodes) >= 3 for p in split.parts)

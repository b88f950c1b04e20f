"""Splits a graph into blocks that a backend runs and parts in eager, unless they are too small.

Every node gets a level, such that a block is all nodes of one kind at one level: the level of a
node is the largest level among its inputs, plus one wherever a value passes from a backend node
to an eager node or back. Edges never lead to a lower level, so the parts, run in order of their
levels, never wait for each other in a circle, and there are as few of them as the alternation of
kinds along any path demands. Nodes that draw random numbers keep their order.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, fx

from dynamo_backends._torch_private import OpOverload, counts_flops, lazy_graph_module
from dynamo_backends.graph.aliasing import tensor_bytes
from dynamo_backends.graph.graph import Graph, Input, Role
from dynamo_backends.graph.random_draws import is_random


@dataclass(frozen=True)
class GraphPart:
    """A subgraph of a partition, to run on the backend or in eager.

    Attributes:
        graph: The part as a graph of its own.
        on_backend: Whether the backend runs it.
        reads: Names of the values of the whole graph that are its inputs.
        writes: Names of the values of the whole graph that are its outputs.
    """

    graph: Graph
    on_backend: bool
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True)
class PartitionedGraph:
    """A graph's parts in execution order, and the reason for each eager node."""

    parts: tuple[GraphPart, ...]
    reasons: Mapping[fx.Node, str]


def partition(
    graph: Graph,
    eager: Mapping[fx.Node, str],
    min_block_size: int,
    expected: Collection[str] = (),
) -> PartitionedGraph:
    """Partitions a graph into backend blocks and eager parts; small blocks go to eager.

    Args:
        graph: In normal form.
        eager: The calls that run in eager, with reasons.
        min_block_size: Smaller blocks are left to eager, unless nothing splits the graph.
        expected: Reasons for eager nodes that do not count as splitting the graph.
    """
    reasons = dict(eager)
    levels = _levels(graph, reasons)
    if any(reason not in expected for reason in reasons.values()):
        _drop_small_blocks(levels, reasons, min_block_size)
        levels = _levels(graph, reasons)
    by_level: dict[int, list[fx.Node]] = {}
    for node in graph.calls:
        by_level.setdefault(levels[node], []).append(node)
    parts = [extract_part(graph, by_level[level], level % 2 == 0) for level in sorted(by_level)]
    return PartitionedGraph(tuple(parts), reasons)


def count_aten_calls(nodes: list[fx.Node]) -> int:
    """Counts the calls of ATen operators; `getitem` does not count."""
    return sum(isinstance(n.target, OpOverload) for n in nodes)


def _levels(graph: Graph, eager: Mapping[fx.Node, str]) -> dict[fx.Node, int]:
    # Backend levels are even, eager levels odd; eager nodes that need no backend value run at -1.
    levels: dict[fx.Node, int] = {}
    last_random: fx.Node | None = None
    for node in graph.calls:
        parity = 1 if node in eager else 0
        level = -1 if parity else 0
        before = list(node.all_input_nodes)
        if is_random(node):
            before += [last_random] if last_random is not None else []
            last_random = node
        for source in before:
            if source in levels:
                at = levels[source]
                level = max(level, at + (at % 2 != parity))
        levels[node] = level
    return levels


def _drop_small_blocks(
    levels: Mapping[fx.Node, int], reasons: dict[fx.Node, str], minimum: int
) -> None:
    blocks: dict[int, list[fx.Node]] = {}
    for node, level in levels.items():
        if level % 2 == 0:
            blocks.setdefault(level, []).append(node)
    for nodes in blocks.values():
        size = count_aten_calls(nodes)
        if size < minimum:
            for node in nodes:
                reasons[node] = (
                    f"its block has {size} operators, fewer than min_block_size={minimum}"
                )


def extract_part(graph: Graph, nodes: list[fx.Node], on_backend: bool) -> GraphPart:
    """Extracts calls as a `GraphPart`; its outputs are the values that nodes outside read.

    Args:
        graph: In normal form; not changed.
        nodes: The calls, in order.
        on_backend: Whether a backend is to run them.
    """
    inside = set(nodes)
    reads = dict.fromkeys(s for n in nodes for s in n.all_input_nodes if s not in inside)
    # Graph inputs first and in their order, so that equal graphs get equal fingerprints.
    order = {n: i for i, n in enumerate(graph.module.graph.nodes)}
    inputs = sorted(reads, key=order.__getitem__)
    writes = [n for n in nodes if any(user not in inside for user in n.users)]
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        if node.op == "get_attr":
            copies[node] = part.node_copy(node)
        else:
            copies[node] = part.placeholder(node.name)
        copies[node].meta = node.meta
    inputs = [n for n in inputs if n.op != "get_attr"]
    for node in nodes:
        copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(tuple(copies[n] for n in writes))
    known = dict(zip(graph.placeholders, graph.inputs, strict=True))
    roles = tuple(_role(known, n) for n in inputs)
    module = lazy_graph_module(graph.module, part)
    return GraphPart(
        Graph(module, graph.kind, roles),
        on_backend,
        tuple(n.name for n in inputs),
        tuple(n.name for n in writes),
    )


def _role(known: Mapping[fx.Node, Input], node: fx.Node) -> Input:
    """Returns what a value is to a part, which is given nothing to write over (see `donation`)."""
    role = known.get(node)
    if role is None:
        return Input(node.name, Role.INTERMEDIATE)
    return role if role.updated_by is None else replace(role, updated_by=None)


def extract_callable(
    graph: Graph, reads: Iterable[fx.Node], calls: Iterable[fx.Node], made: Iterable[fx.Node]
) -> Callable[..., Sequence[Tensor]]:
    """Builds a callable that computes some of a graph's calls from given placeholders.

    Args:
        graph: The graph; not changed.
        reads: Placeholders, whose values it takes.
        calls: What it runs, in order.
        made: Among both, whose values it returns.
    """
    copied = fx.Graph()
    copies = {node: copied.placeholder(node.name) for node in reads}
    for node in calls:
        copies[node] = copied.node_copy(node, copies.__getitem__)
    copied.output(tuple(copies[n] for n in made))
    return fx.GraphModule(graph.module, copied).forward


def without_calls(
    graph: Graph, calls: Collection[fx.Node], inputs: Sequence[tuple[fx.Node, Input]]
) -> Graph:
    """Copies a graph without some of its calls; their results become inputs.

    Args:
        graph: The graph; not changed.
        calls: Which are left out.
        inputs: Inputs of the new graph: placeholders, and left out calls that others read.
    """
    copied = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node, _ in inputs:
        copies[node] = copied.placeholder(node.name)
        copies[node].meta = node.meta
    for node in graph.calls:
        if node not in calls:
            copies[node] = copied.node_copy(node, copies.__getitem__)
    copied.output(fx.map_arg(graph.module.graph.output_node().args[0], copies.__getitem__))
    module = fx.GraphModule(graph.module, copied)
    return Graph(module, graph.kind, tuple(role for _, role in inputs))


MANY_BLOCKS = 4
BLOCK_COST = 10.0  # in small operators
_BYTES_PER_OPERATOR = 64 * 1024


def fragmentation_reason(split: PartitionedGraph) -> str | None:
    """Returns why a partition is too fragmented to pay off; None if it is not.

    Requires: static shapes.

    Returns:
        The reason, or None if the blocks are worth it.
    """
    blocks = [part.graph.calls for part in split.parts if part.on_backend]
    if len(blocks) < MANY_BLOCKS:
        return None
    work = sum(estimate_operator_cost(node) for nodes in blocks for node in nodes) / len(blocks)
    if work >= BLOCK_COST:
        return None
    size = sum(map(count_aten_calls, blocks)) / len(blocks)
    return (
        f"{len(blocks)} blocks of {size:.3g} operators on average; a block does the work of "
        f"{work:.2g} small operators, but calling it costs about as much as {BLOCK_COST:.0f}"
    )


def estimate_operator_cost(node: fx.Node) -> float:
    """Estimates a call's cost in eager, in units of one operator on small tensors."""
    op = node.target
    if not isinstance(op, OpOverload):
        return 0.0
    if counts_flops(op):
        return BLOCK_COST
    written = 0 if op.is_view else tensor_bytes(node.meta.get("val"))
    return 1.0 + written / _BYTES_PER_OPERATOR

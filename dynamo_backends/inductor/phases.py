"""Takes a step apart for Inductor: at its backward passes, and before the update's formulas.

The first part may fail, and has changed nothing then. The second, which is given the gradients and
some numbers, only consists of loops over the elements of one tensor each; it writes over the old
contents. So both together need no second copy of parameters and state.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends._torch_private import OpOverload
from dynamo_backends.graph.aliasing import find_view_base
from dynamo_backends.graph.graph import Graph, eliminate_dead_calls

aten = torch.ops.aten


@dataclass(frozen=True)
class Phases:
    """The two parts of a step.

    Attributes:
        compute: From the step's inputs to what `write` needs, and then the step's other outputs.
        write: Returns nothing; writes to its inputs.
        handed: How many outputs of `compute` are the first inputs of `write`.
        rest: Positions of the inputs of the step that are the other inputs of `write`.
    """

    compute: fx.GraphModule
    write: fx.GraphModule
    handed: int
    rest: tuple[int, ...]


def separate(graph: Graph) -> Phases:
    """Takes a step apart.

    Args:
        graph: Graph of the kind "step", functional; not changed.
    """
    places = {p: i for i, p in enumerate(graph.placeholders)}
    updated = [p for p, x in zip(places, graph.inputs, strict=True) if x.updated_by is not None]
    new: list[fx.Node] = list(graph.outputs[: len(updated)])
    results = graph.outputs[len(updated) :]
    order = _late(graph, set(updated), results)
    late = set(order)
    reads = dict.fromkeys(updated)
    # An input that becomes the contents of another is read before anything is written.
    handed = dict.fromkeys(node for node in new if node not in late)
    for node in order:
        for source in node.all_input_nodes:
            if source not in late:
                (reads if source in places else handed)[source] = None
    return Phases(
        _compute(graph, (*handed, *results), set(updated)),
        _write(order, handed, reads, zip(updated, new, strict=True)),
        len(handed),
        tuple(places[p] for p in reads),
    )


def _late(graph: Graph, updated: set[fx.Node], results: Sequence[Any]) -> list[fx.Node]:
    """Calls of the second part: element-wise, after something updated, and read only there."""
    returned = {x for x in results if isinstance(x, fx.Node)}
    possible = [n for n in graph.calls if n not in returned and _size(n) > 1 and is_elementwise(n)]
    late: set[fx.Node] = set()
    for node in possible:
        if any(n in updated or n in late for n in node.all_input_nodes):
            late.add(node)
    for node in reversed(possible):
        if node in late and not _is_read_only_by(node, late):
            late.discard(node)
    handed = {n for node in late for n in node.all_input_nodes if n.op == "call_function"} - late
    for node in reversed(possible):  # what follows from what is handed over anyway
        given = [n for n in node.all_input_nodes if n.op == "call_function" and _size(n) > 1]
        if node in handed and _is_read_only_by(node, late) and handed.issuperset(given):
            handed.remove(node)
            late.add(node)
    return [node for node in graph.calls if node in late]


def _is_read_only_by(node: fx.Node, readers: set[fx.Node]) -> bool:
    return all(user in readers or user.op == "output" for user in node.users)


def _size(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, Tensor) else 0


def is_elementwise(node: fx.Node) -> bool:
    """Returns whether each result element depends on one element of each tensor argument."""
    target, value = node.target, node.meta.get("val")
    if not isinstance(target, OpOverload) or not isinstance(value, Tensor):
        return False
    is_cast = target is torch.ops.prims.convert_element_type.default
    if not (is_cast or torch.Tag.pointwise in target.tags) or target.is_view:
        return False
    given = [n.meta.get("val") for n in node.all_input_nodes]
    return all(isinstance(x, Tensor) and (x.shape == value.shape or x.numel() == 1) for x in given)


def _compute(graph: Graph, outputs: Sequence[Any], updated: set[fx.Node]) -> fx.GraphModule:
    copy = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    copy.graph_copy(graph.module.graph, nodes)
    found = [
        _apart(nodes[x], find_view_base(x) in updated) if isinstance(x, fx.Node) else x
        for x in outputs
    ]
    copy.output(tuple(found))
    eliminate_dead_calls(copy)
    return fx.GraphModule(graph.module, copy)


def _apart(node: fx.Node, will_be_overwritten: bool) -> fx.Node:
    if not will_be_overwritten:
        return node
    clone = node.graph.call_function(aten.clone.default, (node,))
    clone.meta = {"val": aten.clone.default(node.meta["val"])}
    return clone


def _write(
    calls: Iterable[fx.Node],
    handed: Iterable[fx.Node],
    reads: Iterable[fx.Node],
    updates: Iterable[tuple[fx.Node, fx.Node]],
) -> fx.GraphModule:
    copy = fx.Graph()
    given = {node: _placeholder(copy, node, f"handed_{i}") for i, node in enumerate(handed)}
    places = {node: _placeholder(copy, node, f"input_{i}") for i, node in enumerate(reads)}
    nodes = {**given, **places}
    for node in calls:
        nodes[node] = copy.node_copy(node, nodes.__getitem__)
    for target, value in updates:
        source = given.get(value) or nodes[value]
        written = copy.call_function(aten.copy_.default, (places[target], source))
        written.meta = {"val": places[target].meta["val"]}
    copy.output(())
    return fx.GraphModule(torch.nn.Module(), copy)


def _placeholder(graph: fx.Graph, like: fx.Node, name: str) -> fx.Node:
    place = graph.placeholder(name)
    place.meta = {"val": like.meta["val"]}
    return place


_RECURRENT = aten.mkldnn_rnn_layer.default


@dataclass(frozen=True)
class Stage:
    """A part of a step.

    Attributes:
        module: Its graph.
        reads: Names of its inputs: of inputs of the step, and of what stages before it make.
        makes: Names of its outputs.
    """

    module: fx.GraphModule
    reads: tuple[str, ...]
    makes: tuple[str, ...]


def cut(module: fx.GraphModule) -> list[Stage]:
    """Splits a graph into stages at its backward passes.

    Args:
        module: With marks of `mark_backward_pass`; its outputs are nodes. It may be changed.

    Returns:
        The stages in order: at least one.
    """
    stages = []
    for early in list(_cuts(module.graph)):
        first, module = _divide(module, early)
        stages.append(first)
    return [*stages, _stage(module, (node.name for node in _outputs(module.graph)))]


def _cuts(graph: fx.Graph) -> Iterator[frozenset[str]]:
    """Returns for each cut the names of all calls before it.

    There are cuts before a backward pass, if products come before it that belong to none, and
    then also at the end of the pass before these.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    passes: dict[int, list[int]] = {}
    for i, node in enumerate(calls):
        if (number := private.backward_pass_number(node)) is not None:
            passes.setdefault(number, []).append(i)
    end = 0
    for places in sorted(passes.values()):
        begin = places[0]
        if any(map(_is_product, calls[end:begin])):
            for place in (end, begin):
                if place:
                    yield frozenset(node.name for node in calls[:place])
        end = places[-1] + 1


def _is_product(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, private.OpOverload):
        return False
    return target is _RECURRENT or private.counts_flops(target)


def _divide(module: fx.GraphModule, early: frozenset[str]) -> tuple[Stage, fx.GraphModule]:
    """Returns the stage up to a cut, and the graph of what follows."""
    graph = module.graph
    calls = [node for node in graph.nodes if node.op == "call_function"]
    late = {node for node in calls if node.name not in early}
    # What the forward computes at the end, as the loss: the partitioner starts from that.
    ends = [
        node for node in calls
        if node.name in early and _is_tensor(node) and not any(u.name in early for u in node.users)
    ]  # fmt: skip
    outputs = _outputs(graph)
    given = {node.name for node in graph.find_nodes(op="placeholder")}
    is_early = [node.name in early or node.name in given for node in outputs]
    made = list(compress(outputs, is_early))
    rest = [node for node, before in zip(outputs, is_early, strict=True) if not before]
    graph.output_node().args = ((*ends, *made, *rest),)
    graph.output_node().meta.clear()
    before, after = private.divide_by_min_cut(module, late, len(ends) + len(made))
    handed = after.graph.find_nodes(op="placeholder")
    _drop_unread(after.graph, early)  # the partitioner leaves draws, which happen in the first part
    _compute_when_needed(after.graph, early)
    return _stage(before, (node.name for node in chain(made, handed))), after


def _drop_unread(graph: fx.Graph, names: frozenset[str]) -> None:
    """Erases calls with certain names that nobody reads, draws of random numbers among them."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and node.name in names and not node.users:
            graph.erase_node(node)


def _compute_when_needed(graph: fx.Graph, names: frozenset[str]) -> None:
    """Moves calls with certain names to where they are first read."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and node.name in names:
            min(node.users).prepend(node)  # nodes compare by their places in the graph


def _stage(module: fx.GraphModule, names: Iterable[str]) -> Stage:
    """Returns a graph that returns calls with certain names, and computes nothing else."""
    graph = module.graph
    calls = {node.name: node for node in graph.nodes if node.op == "call_function"}
    makes = tuple(name for name in dict.fromkeys(names) if name in calls)
    graph.output_node().args = (tuple(calls[name] for name in makes),)
    eliminate_dead_calls(graph)
    for place in graph.find_nodes(op="placeholder"):
        if not place.users:
            graph.erase_node(place)
    module.recompile()
    reads = tuple(place.name for place in graph.find_nodes(op="placeholder"))
    return Stage(module, reads, makes)


def _outputs(graph: fx.Graph) -> Sequence[fx.Node]:
    outputs: Any = graph.output_node().args[0]
    return tuple(outputs)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)

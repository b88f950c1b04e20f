"""Takes a step apart: all that computes, and the element-wise formulas that end the update.

The first part may fail, and has changed nothing then. The second, which is given the gradients and
some numbers, only consists of loops over the elements of one tensor each; it writes over the old
contents. So both together need no second copy of parameters and state.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.graph.aliasing import root
from dynamo_backends.graph.graph import Graph, drop_dead

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
        graph: Of the kind "step", functional; not changed.
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
    """Whether each element of the result depends on the same element of tensors of one shape."""
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
    found = [_apart(nodes[x], root(x) in updated) if isinstance(x, fx.Node) else x for x in outputs]
    copy.output(tuple(found))
    drop_dead(copy)
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

"""Cuts what a step computes where a backward pass begins or ends: one program of Inductor's each.

Inductor lets no loop rematerialize what another has computed, and it merges loops that read the
same memory. Were forward and backward one program, loops of the forward would also write what only
the backward reads. So a step is cut where `torch.compile` cuts it, by torch's partitioner, which
lets the backward compute cheap things again.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends.graph.graph import drop_dead

aten = torch.ops.aten

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
    """Takes a graph apart; see the module's docstring.

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
    """For each cut, the names of all calls before it.

    There are cuts before a backward pass, if products come before it that belong to none, and
    then also at the end of the pass before these.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    passes: dict[int, list[int]] = {}
    for i, node in enumerate(calls):
        if (number := private.backward_pass(node)) is not None:
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
    drop_dead(graph)
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

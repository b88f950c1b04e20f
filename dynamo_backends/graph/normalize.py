"""Brings a functional ATen graph from AOT Autograd into normal form, with the inputs it updates."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends.graph.aliasing import find_view_base
from dynamo_backends.graph.graph import (
    WEIGHT_ROLES,
    Graph,
    Input,
    Role,
    copy_graph,
    eliminate_dead_calls,
)
from dynamo_backends.graph.pass_sequence import PassSequence
from dynamo_backends.graph.properties import NORMAL_FORM, Property, Stage
from dynamo_backends.graph.shape_propagation import PROPAGATE
from dynamo_backends.interface.report import Kind


@dataclass(frozen=True)
class Alias:
    """An output that shares memory with inputs or other outputs.

    Attributes:
        output: Which output of the captured graph, counted from 0.
        inputs: Names of the inputs whose memory it shares.
        outputs: The other outputs whose memory it shares.
    """

    output: int
    inputs: tuple[str, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Effects:
    """What a captured graph does besides returning: mutated inputs and aliased outputs.

    Attributes:
        mutated: Names of the inputs that are written to; AOT Autograd copies the new contents back.
        aliases: One entry per output that shares memory with inputs or other outputs.
    """

    mutated: tuple[str, ...] = field(default=())
    aliases: tuple[Alias, ...] = field(default=())


def find_effects(graph: fx.Graph) -> Effects:
    """Finds mutated inputs and aliased outputs of an inference or forward graph."""
    nodes = graph.output_node().args[0]
    places = {private.dynamo_input_index(p): p.name for p in graph.find_nodes(op="placeholder")}
    written: dict[fx.Node, str] = {}
    results: dict[int, fx.Node] = {}
    for node, desc in zip(nodes, graph.output_node().meta.get("desc") or (), strict=False):  # type: ignore[arg-type]
        if not isinstance(node, fx.Node):
            continue
        index = private.mutated_input_index(desc)
        output = private.output_index(desc)
        if index is not None:
            written[find_view_base(node)] = places.get(index, f"input {index}")
        elif output is not None:
            results[output] = find_view_base(node)
    names = {**{p: p.name for p in graph.find_nodes(op="placeholder")}, **written}
    aliases = []
    for i, base in results.items():
        others = tuple(j for j, other in results.items() if j != i and other is base)
        inputs = (names[base],) if base in names else ()
        if others or inputs:
            aliases.append(Alias(i, inputs, others))
    return Effects(tuple(dict.fromkeys(written.values())), tuple(aliases))


aten = torch.ops.aten


@dataclass(frozen=True)
class NormalizedGraph:
    """The result of `normalize`: a graph in normal form, its constants and its effects.

    Attributes:
        graph: The graph. Its first inputs are those of the AOT graph, in order; constants follow.
        constants: One tensor per constant placeholder, in order.
        effects: Which inputs the captured graph changes and what its outputs share.
    """

    graph: Graph
    constants: tuple[Tensor, ...]
    effects: Effects = field(default_factory=Effects)


def normalize(
    gm: fx.GraphModule, kind: Kind, freeze: bool, static: Collection[int] = ()
) -> NormalizedGraph:
    """Copies AOT Autograd's graph into normal form: roles, lifted constants, no dead calls.

    Args:
        gm: A functional graph from AOT Autograd.
        kind: Which of AOT Autograd's graphs it is.
        freeze: Whether parameters, buffers and constants are to be bound once.
        static: Which of the captured graph's inputs are parameters and buffers.
    """
    module = private.lazy_graph_module(gm, copy_graph(gm.graph))
    updates = private.annotated_input_mutations(gm.graph)
    inputs = [
        Input(p.name, _role(p, kind, gm.graph, static), updated_by=updates.get(i))
        for i, p in enumerate(module.graph.find_nodes(op="placeholder"))
    ]
    constants = lift_constants(module)
    inputs += [Input(name, Role.CONSTANT) for name in constants]
    # The one composite operator that torch makes of symbolic numbers after it has decomposed.
    for node in module.graph.find_nodes(op="call_function", target=aten.true_divide.Tensor):
        node.target = aten.div.Tensor
    eliminate_dead_calls(module.graph)
    module.recompile()
    if freeze and kind == "inference":
        inputs = [replace(x, frozen=x.role in WEIGHT_ROLES) for x in inputs]
    graph = Graph(module, kind, tuple(inputs))
    PassSequence((PROPAGATE,), given=NORMALIZE.ensures)(graph)
    found = Effects() if kind == "backward" else find_effects(gm.graph)
    return NormalizedGraph(graph, tuple(constants.values()), found)


def _role(placeholder: fx.Node, kind: Kind, graph: fx.Graph, static: Collection[int]) -> Role:
    value = placeholder.meta.get("val")
    if not isinstance(value, Tensor):
        return Role.SYMBOL
    if kind == "backward":
        return Role.TANGENT if private.is_tangent(placeholder) else Role.SAVED
    index = private.wrapper_input_index(placeholder)
    if index is None or index not in static:
        return Role.ACTIVATION
    if index in private.mutated_dynamo_inputs(graph):
        return Role.MUTATED
    return Role.PARAMETER if value.is_floating_point() and value.requires_grad else Role.BUFFER


def lift_constants(module: fx.GraphModule) -> Mapping[str, Tensor]:
    """Turns tensor attributes into placeholders after the others; returns them by name."""
    constants: dict[str, Tensor] = {}
    lifted: dict[int, fx.Node] = {}
    last = next(reversed(module.graph.find_nodes(op="placeholder")), None)
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, str(node.target), None)
        if not isinstance(value, Tensor):
            continue
        _write_out(node, value)
        if not node.users:
            module.graph.erase_node(node)
            continue
        if id(value) not in lifted:
            last = lifted[id(value)] = _add_placeholder(module.graph, node, value, last)
            constants[last.name] = value
        node.replace_all_uses_with(lifted[id(value)])
        module.graph.erase_node(node)
    return constants


def _write_out(constant: fx.Node, value: Tensor) -> None:
    """Writes a literal that tensors are filled with (`x[0] = 5`) as the number that it is.

    As a tensor it is one of the host, which a graph of another device would have to read.
    """
    if value.ndim or value.device.type != "cpu":
        return
    copies = [n for n in constant.users if n.target is aten.lift_fresh_copy.default]
    for filled in [n for copy in copies for n in copy.users if n.target is aten.fill.Tensor]:
        filled.target = aten.fill.Scalar
        with private.disable_current_modes():
            filled.args = (filled.args[0], value.item())
    for copy in copies:
        if not copy.users:
            constant.graph.erase_node(copy)


def _add_placeholder(
    graph: fx.Graph, constant: fx.Node, value: Tensor, after: fx.Node | None
) -> fx.Node:
    first = next(iter(graph.nodes))
    with graph.inserting_before(first) if after is None else graph.inserting_after(after):
        place = graph.placeholder(str(constant.target).lstrip("_"))
    place.meta["val"] = constant.meta.get("val", value)
    return place


NORMALIZE = Stage(
    name="normalize",
    summary="inputs get roles, constants become inputs, unused calls are removed",
    requires=frozenset({Property.ORDERED, Property.FUNCTIONAL, Property.DIALECT}),
    ensures=NORMAL_FORM - {Property.TYPED},
)

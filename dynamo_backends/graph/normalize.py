"""Brings a functional ATen graph from AOT Autograd into normal form (see `graph.graph`)."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends.graph.graph import WEIGHT_ROLES, Graph, Input, Role, copy_graph
from dynamo_backends.report import Kind


@dataclass(frozen=True)
class Normalized:
    """A graph in normal form, and the constants for its placeholders of role CONSTANT.

    Attributes:
        graph: The graph. Its first inputs are those of the AOT graph, in order; constants follow.
        constants: One tensor per constant placeholder, in order.
    """

    graph: Graph
    constants: tuple[Tensor, ...]


def normalize(gm: fx.GraphModule, kind: Kind, freeze: bool) -> Normalized:
    """Makes a graph in normal form out of one from AOT Autograd; `gm` itself is not changed.

    Args:
        gm: A functional graph from AOT Autograd.
        kind: Which of AOT Autograd's graphs it is.
        freeze: Whether parameters, buffers and constants are to be bound once.
    """
    module = fx.GraphModule(gm, copy_graph(gm.graph))
    inputs = [Input(p.name, _role(p, kind, gm.graph)) for p in _placeholders(module.graph)]
    constants = _lift_constants(module)
    inputs += [Input(name, Role.CONSTANT) for name in constants]
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    if freeze and kind == "inference":
        inputs = [Input(x.name, x.role, x.role in WEIGHT_ROLES) for x in inputs]
    return Normalized(Graph(module, kind, tuple(inputs)), tuple(constants.values()))


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "placeholder"]


def _role(placeholder: fx.Node, kind: Kind, graph: fx.Graph) -> Role:
    value = placeholder.meta.get("val")
    if not isinstance(value, Tensor):
        return Role.SYMBOL
    if kind == "backward":
        return Role.TANGENT if private.is_tangent(placeholder) else Role.SAVED
    index = private.dynamo_input_index(placeholder)
    if index is None or index not in private.static_input_indices():
        return Role.ACTIVATION
    if index in private.mutated_input_indices(graph):
        return Role.MUTATED
    return Role.PARAMETER if value.is_floating_point() and value.requires_grad else Role.BUFFER


def _lift_constants(module: fx.GraphModule) -> Mapping[str, Tensor]:
    """Replaces tensor attributes by placeholders after the existing ones."""
    constants: dict[str, Tensor] = {}
    lifted: dict[str, fx.Node] = {}
    last = _placeholders(module.graph)
    for node in list(module.graph.nodes):
        if node.op != "get_attr":
            continue
        value = getattr(module, str(node.target), None)
        if not isinstance(value, Tensor):
            continue
        name = str(node.target)
        if name not in lifted:
            anchor = last[-1] if last else None
            with (
                module.graph.inserting_after(anchor)
                if anchor is not None
                else module.graph.inserting_before(next(iter(module.graph.nodes)))
            ):
                place = module.graph.placeholder(name.lstrip("_"))
            place.meta["val"] = node.meta.get("val", value)
            lifted[name] = place
            constants[place.name] = value
            last.append(place)
        node.replace_all_uses_with(lifted[name])
        module.graph.erase_node(node)
    return constants

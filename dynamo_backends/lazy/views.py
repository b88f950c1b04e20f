"""Views of a graph's inputs, made of torch's own tensors before Lazy Tensor Core's program runs.

To Lazy Tensor Core a view is a copy, also one of a weight: the transposed weight of each linear
layer would be copied at every call. Its program takes inputs with any strides instead.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from dynamo_backends._torch_private import is_lazy
from dynamo_backends.graph.aliasing import is_view
from dynamo_backends.graph.cutting import calls_first, without_calls
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.roles import Input, Role


def with_views_first(graph: Graph) -> tuple[Graph, Callable[..., Sequence[Tensor]] | None]:
    """A graph without its views of inputs.

    Views that are outputs stay.

    Args:
        graph: With static shapes; not changed.

    Returns:
        What remains, and a function from the inputs of the graph to those of that; None if the
        graph has no such views.
    """
    views = _views(graph)
    if not views:
        return graph, None
    inside = set(views)
    reads = [n for n in (*graph.placeholders, *views) if any(u not in inside for u in n.users)]
    roles = dict(zip(graph.placeholders, graph.inputs, strict=True))
    inputs = [(n, roles.get(n, Input(n.name, Role.INTERMEDIATE))) for n in reads]
    rest = without_calls(graph, inside, inputs)
    return rest, calls_first(graph, graph.placeholders, views, reads)


def _views(graph: Graph) -> list[fx.Node]:
    """The views of inputs, in order; each after what it is a view of."""
    roots = set(graph.placeholders)
    output = graph.module.graph.output_node()
    found = []
    for node in graph.calls:
        of_inputs = is_view(node) and roots.issuperset(node.all_input_nodes)
        if of_inputs and output not in node.users and _is_strided(node.meta["val"]):
            roots.add(node)
            found.append(node)
    return found


def _is_strided(value: Any) -> bool:
    """Whether a view says by strides alone what it is of its base."""
    return isinstance(value, Tensor) and not is_lazy(value)

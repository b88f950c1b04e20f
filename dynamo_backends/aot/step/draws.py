"""Random numbers of a step: drawn by torch before the graph runs, in the order of eager."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from dynamo_backends.graph.graph import Graph, Input, Role
from dynamo_backends.graph.random import is_random


def hoist(graph: Graph) -> tuple[Graph, Callable[[], list[Tensor]]]:
    """Makes what a step draws an input of its graph, if no draw depends on data.

    Args:
        graph: Changed in place.

    Returns:
        The graph with an input for each draw, after the others, and what draws them. If a draw
        depends on data, all stay in the graph, or their order would not be eager's.
    """
    draws = [node for node in graph.calls if is_random(node)]
    if any(node.all_input_nodes for node in draws) or not all(map(_is_one_tensor, draws)):
        return graph, list
    calls = [(node.target, node.args, dict(node.kwargs)) for node in draws]
    inputs = list(graph.inputs)
    last = graph.placeholders[-1]
    for node in draws:
        with graph.module.graph.inserting_after(last):
            place = graph.module.graph.placeholder(f"drawn_{node.name}")
        place.meta = {"val": node.meta["val"]}
        node.replace_all_uses_with(place)
        graph.module.graph.erase_node(node)
        inputs.append(Input(place.name, Role.ACTIVATION))
        last = place
    graph.module.recompile()

    def draw() -> list[Tensor]:
        return [target(*args, **kwargs) for target, args, kwargs in calls]  # type: ignore[operator]

    return replace(graph, inputs=tuple(inputs)), draw


def _is_one_tensor(node: fx.Node) -> bool:
    value: Any = node.meta.get("val")
    return isinstance(value, Tensor)

"""Random numbers of a step: drawn by torch before the graph runs, in the order of eager."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from dynamo_backends._torch_private import annotated_generator_state
from dynamo_backends.graph.graph import Graph, Input, Role, source_line
from dynamo_backends.graph.random_draws import is_random
from dynamo_backends.graph.seeded_draws import replace_draws_by_seeded
from dynamo_backends.interface.errors import StepCaptureError


@dataclass(frozen=True)
class Draws:
    """Draws a step's random numbers.

    Attributes:
        calls: What is called, in order, with positional and keyword arguments.
    """

    calls: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...] = ()

    def __call__(self) -> list[Tensor]:
        """Returns the numbers of one step."""
        return [target(*args, **kwargs) for target, args, kwargs in self.calls]


def _share_redrawn(draws: Sequence[fx.Node]) -> list[fx.Node]:
    """Returns what a checkpoint draws again becomes what was drawn first.

    Returns:
        Those that are left.

    Raises:
        StepCaptureError: One draws again in a way that depends on data.
    """
    first: dict[Any, fx.Node] = {}
    left = []
    for node in draws:
        key = annotated_generator_state(node), node.target, str(node.args), str(node.kwargs)
        known = first.setdefault(key, node) if key[0] is not None else node
        if known is node:
            left.append(node)
            continue
        node.replace_all_uses_with(known)
        node.graph.erase_node(node)
    states = [annotated_generator_state(node) for node in left]
    for node, state in zip(left, states, strict=True):
        if node.all_input_nodes and state is not None and states.count(state) > 1:
            where = source_line(node)
            raise StepCaptureError(
                f"the step calls {node.target} twice with the same state of the generator, as "
                "activation checkpointing does, and its input depends on data"
                + (f" (called at {where})" if where else "")
                + ". A compiled graph cannot repeat these random numbers. Exclude this part from "
                'the checkpoint, or pass fallback="split".'
            )
    return left


def hoist(graph: Graph, seeded: bool = False) -> tuple[Graph, Draws]:
    """Hoists random calls out of the graph: each becomes an input, if none depends on data.

    Args:
        graph: Changed in place.
        seeded: The graph draws by itself what it can, from seeds that are drawn in its place.

    Returns:
        The graph with an input for each draw, after the others, and what draws them. If a draw
        depends on data, all stay in the graph, or their order would not be eager's.

    Raises:
        StepCaptureError: A checkpoint draws again in a way that depends on data.
    """
    draws = _share_redrawn([node for node in graph.calls if is_random(node)])
    if seeded and replace_draws_by_seeded(graph):
        draws = [node for node in graph.calls if is_random(node)]
    if any(node.all_input_nodes for node in draws) or not all(map(_is_one_tensor, draws)):
        return graph, Draws()
    calls = tuple((node.target, node.args, dict(node.kwargs)) for node in draws)
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

    return replace(graph, inputs=tuple(inputs)), Draws(calls)


def _is_one_tensor(node: fx.Node) -> bool:
    value: Any = node.meta.get("val")
    return isinstance(value, Tensor)

"""Splits a joint graph into forward and backward: torch's partitioners and what they leave out."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from dynamo_backends import _torch_private as private
from dynamo_backends.graph.aliasing import is_view
from dynamo_backends.graph.random_draws import generator_state, redraw


def partition_with(name: str) -> Callable[..., Any]:
    """Returns a partitioner for AOT Autograd.

    Beyond torch's own, views are made again in the backward instead of saved, the backward does
    not draw what the forward has drawn, and checkpoints use `graph.random` to draw twice.

    Args:
        name: "default" or "min_cut" (see `Options.partitioner`).
    """
    split = private.partition_function(name)

    def partition(joint: fx.GraphModule, inputs: Any, **settings: Any) -> Any:
        make_views_again(joint)
        mutated = {node.name for node in private.mutated_placeholders(joint.graph)}
        forward, backward = split(joint, inputs, **settings)
        _save_mutated_inputs(forward, backward, mutated)
        _drop_repeated_draws(forward, backward)
        for module in (forward, backward):
            _expose_generator_states(module)
            module.recompile()
        return forward, backward

    return partition


def make_views_again(joint: fx.GraphModule) -> None:
    """Recomputes views in the backward graph, so that their bases are saved instead.

    A backend that returns a view of an input has to copy it: saved transposed weights would be
    copies, which cost time and memory, and would not notice that the weight was changed.
    """
    order = {node: i for i, node in enumerate(joint.graph.nodes)}
    for node in reversed(list(order)):
        if not _is_plain_view(node) or private.is_of_backward(node):
            continue
        late = [u for u in node.users if u.op != "output" and private.is_of_backward(u)]
        if not late:
            continue
        first = min(late, key=order.__getitem__)
        with joint.graph.inserting_before(first):
            copy = joint.graph.node_copy(node)
        private.mark_as_backward(copy)
        order[copy] = order[first]
        for user in late:
            user.replace_input_with(node, copy)


def _is_plain_view(node: fx.Node) -> bool:
    """Returns whether a call is a view of its first argument, of a shape that is known."""
    if not is_view(node) or "recompute" in node.meta:
        return False
    sources = node.all_input_nodes
    values = [node.meta.get("val"), *(source.meta.get("val") for source in sources)]
    return len(sources) == 1 and all(_is_static(value) for value in values)


def _is_static(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and all(isinstance(s, int) for s in value.shape)


def _drop_repeated_draws(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Erases calls that draw in the backward graph although only the forward graph reads them.

    torch keeps every call that draws, in both.
    """
    drawn = {node.name for node in forward.graph.nodes}

    def is_kept(node: fx.Node) -> bool:
        return node.op != "call_function" or (node.is_impure() and node.name not in drawn)

    backward.graph.eliminate_dead_code(is_impure_node=is_kept)


def _save_mutated_inputs(
    forward: fx.GraphModule, backward: fx.GraphModule, mutated: Collection[str]
) -> None:
    """Has the forward save copies of inputs that it mutates and the backward computes with again.

    A checkpoint around a batch norm reads the running statistics twice. What autograd itself saves
    is left alone: eager raises if it is mutated.
    """
    computed = {node.name for node in forward.graph.nodes}
    output = forward.graph.output_node()
    for place in backward.graph.find_nodes(op="placeholder"):
        if place.name not in mutated or not all(user.name in computed for user in place.users):
            continue
        saved = next(node for node in forward.graph.nodes if node.name == place.name)
        with forward.graph.inserting_before(output):
            copy = forward.graph.call_function(torch.ops.aten.clone.default, (saved,))
        copy.meta = {k: v for k, v in saved.meta.items() if k != "desc"}
        output.replace_input_with(saved, copy)


def _expose_generator_states(module: fx.GraphModule) -> None:
    """Replaces torch's higher-order operators for what a checkpoint draws twice.

    They say nothing of the state's size and hide what is drawn.
    """
    save, use = private.checkpoint_rng_operators()
    for node in list(module.graph.nodes):
        if node.op == "placeholder" and any(_is_state(u, node, use) for u in node.users):
            node.meta["val"] = _fake_state(node.meta["val"])
        elif node.op == "call_function" and node.target is save:
            _draw_and_save(module.graph, node)
        elif node.op == "call_function" and node.target is use:
            node.target = redraw


def _draw_and_save(graph: fx.Graph, node: fx.Node) -> None:
    """Two calls in place of one: the generator's state, then the draw."""
    draws, *args = node.args
    with graph.inserting_before(node):
        state = graph.call_function(generator_state, (args[0].meta["val"].device,))  # type: ignore[union-attr]
        state.meta = {**node.meta, "val": _fake_state(args[0].meta["val"])}  # type: ignore[union-attr]
        drawn = graph.call_function(draws, tuple(args), node.kwargs)  # type: ignore[arg-type]
        drawn.meta = dict(node.meta)
        drawn.meta.pop("val", None)
    for user in list(node.users):
        user.replace_all_uses_with((state, drawn)[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(node)


def _is_state(user: fx.Node, node: fx.Node, use: Any) -> bool:
    return user.target is use and user.args[0] is node


def _fake_state(value: Any) -> torch.Tensor:
    """The state as it is: torch traces it with a symbolic size that no input of the graph tells."""
    size = generator_state(torch.device("cpu")).numel()
    with value.fake_mode:
        return torch.empty(size, dtype=torch.uint8)

"""Finds outputs that share memory, makes torch replay them as views; estimates memory.

A backend returns every output in memory of its own. So where two outputs come from one tensor
through view operators, the backend returns that tensor, and torch makes the views of it. Outputs
that are views of inputs are restored by AOT Autograd; where a view's arguments are symbolic by the
strides and the storage offset of what the graph returned, so that torch makes these views, too.
"""

import math
import operator
from collections import Counter
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.graph.graph import Graph, eliminate_dead_calls
from dynamo_backends.graph.properties import NORMAL_FORM, Pass, Property

REPLAYED = "replayed_view"


def is_view(node: fx.Node) -> bool:
    """Returns whether a call's operator returns a view of its first argument."""
    return isinstance(node.target, OpOverload) and node.target.is_view


def is_identity_view(view: fx.Node) -> bool:
    """Returns whether a view has the dtype, sizes and strides of its source."""
    source = view.args[0] if is_view(view) else None
    if not isinstance(source, fx.Node):
        return False
    a, b = source.meta["val"], view.meta["val"]
    if not isinstance(a, torch.Tensor) or a.dtype != b.dtype or a.ndim != b.ndim:
        return False
    sizes = (*a.shape, *a.stride(), *b.shape, *b.stride())
    return all(isinstance(s, int) for s in sizes) and (a.shape, a.stride()) == (
        b.shape,
        b.stride(),
    )


def is_replayed_view(node: fx.Node) -> bool:
    """Returns whether torch makes a node's view after the program has run."""
    return REPLAYED in node.meta


_RESTORED = ("inference", "forward")
"""Kinds of graphs whose results AOT Autograd makes views of inputs."""


def find_aliased_outputs(graph: Graph) -> dict[int, fx.Node]:
    """Finds outputs that alias other outputs or inputs and are no replayed views yet.

    Returns:
        For each, the tensor that it is a view of, through any number of views.
    """
    outputs = [x if isinstance(x, fx.Node) else None for x in graph.outputs]
    roots = [None if x is None else find_view_base(x) for x in outputs]
    count = Counter(roots)
    return {
        i: base
        for i, (node, base) in enumerate(zip(outputs, roots, strict=True))
        if node is not None
        and base is not None
        and node is not base
        and not is_replayed_view(node)
        and (
            (base.op == "call_function" and count[base] > 1)
            or (base.op == "placeholder" and graph.kind in _RESTORED)
        )
    }


def replay_output_views(graph: Graph) -> bool:
    """Makes outputs that alias each other views of one output; torch replays the views.

    Requires: normal form. Ensures: normal form, `OUTPUTS_APART`; same bits.
    """
    shared = find_aliased_outputs(graph)
    if not shared:
        return False
    fx_graph = graph.module.graph
    output = fx_graph.output_node()
    results = list(graph.outputs)
    with fx_graph.inserting_before(output):
        for i, base in shared.items():
            results[i] = _replay(fx_graph, results[i], base)
            if graph.kind == "forward" and base.op == "call_function":
                results[i] = _detached(fx_graph, results[i])
    output.args = (tuple(results),)
    eliminate_dead_calls(fx_graph)
    return True


def _base(node: fx.Node) -> fx.Node | None:
    """Returns the direct source of a view; None if the node has memory of its own."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        source = node.args[0]
        return source if isinstance(source, fx.Node) and _base(source) is not None else None
    if is_view(node):
        source = node.args[0]
        return source if isinstance(source, fx.Node) else None
    return None


def find_view_base(node: fx.Node) -> fx.Node:
    """Follows views up to the tensor that owns the memory; a tensor of its own is returned."""
    base = _base(node)
    while base is not None:
        node = base
        base = _base(node)
    return node


def _detached(graph: fx.Graph, view: fx.Node) -> fx.Node:
    """Detaches a replayed view, so that autograd does not treat it as a view of its base.

    A view needs one whenever its base does: `y[:3], y.detach()`.
    """
    source = view
    while source.target is not torch.ops.aten.as_strided.default and is_identity_view(source):
        source = source.args[0]  # type: ignore[assignment]
    detached = graph.call_function(torch.ops.aten.detach.default, (source,))
    detached.meta = {**view.meta, REPLAYED: True}
    return detached


def _replay(graph: fx.Graph, node: fx.Node, end: fx.Node) -> fx.Node:
    if node is end:
        return node
    base = _base(node)
    assert base is not None
    source = _replay(graph, base, end)
    copy = graph.node_copy(node, lambda n: source if n is base else n)
    copy.meta[REPLAYED] = True
    return copy


SEPARATE_VIEWS = Pass(
    name="separate views",
    summary=(
        "outputs that share storage with other outputs or with inputs are created by torch as views"
    ),
    requires=NORMAL_FORM,
    ensures=frozenset({Property.OUTPUTS_APART}),
    run=replay_output_views,
)


def estimate_peak_bytes(graph: fx.Graph) -> int:
    """Estimates the peak CPU memory, in bytes, of intermediate results of an unfused run.

    Inputs and weights are not counted.

    Args:
        graph: Functional, with static shapes. Each call counts as if it were computed by itself;
            compilers that fuse calls need less.
    """
    steps = [n for n in graph.nodes if n.op in ("call_function", "output")]
    last = {find_view_base(used): node for node in steps for used in node.all_input_nodes}
    dying: dict[fx.Node, list[fx.Node]] = {}
    for source, node in last.items():
        dying.setdefault(node, []).append(source)
    sizes: dict[fx.Node, int] = {}
    alive = peak = 0
    for node in steps:
        value = node.meta.get("val")
        is_on_cpu = isinstance(value, Tensor) and value.device.type == "cpu"
        if is_on_cpu and find_view_base(node) is node and node in last:
            sizes[node] = tensor_bytes(value)
            alive += sizes[node]
        peak = max(peak, alive)
        alive -= sum(sizes.get(source, 0) for source in dying.get(node, ()))
    return peak


def tensor_bytes(value: Any) -> int:
    """Counts the bytes of a tensor's elements, or of all tensors in nested lists."""
    if isinstance(value, Tensor):
        return math.prod(value.shape) * value.element_size()
    if isinstance(value, list | tuple):
        return sum(map(tensor_bytes, value))
    return 0

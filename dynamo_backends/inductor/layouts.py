"""Images are kept channels last on CPUs, where kernels of convolutions are faster so.

A graph is traced with the layouts of eager. Here the operators that gain by it get what they read
channels last, and what follows from that is computed again for all calls after them. What depends
on the order of memory gets eager's: operators that read strides or draw random numbers, those of
other libraries, and results that leave the graph.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends.graph.layouts import dense_order
from dynamo_backends.graph.random_draws import is_random
from dynamo_backends.graph.shape_propagation import ShapeInference
from dynamo_backends.kernels.patterns import (
    CONVOLUTION_BACKWARD,
    POOLS,
    is_image_on_cpu,
    keep_stride_order,
)
from dynamo_backends.kernels.small_channels import CONVOLVE_IN_GROUPS
from dynamo_backends.kernels.winograd import CONVOLVE

aten = torch.ops.aten

_FASTER = {
    aten.convolution.default,
    aten.convolution_backward.default,
    CONVOLUTION_BACKWARD,
    *POOLS.values(),
    CONVOLVE,
    CONVOLVE_IN_GROUPS,
}
_READ_STRIDES = {
    aten.as_strided.default,
    aten.as_strided_copy.default,
    aten.as_strided_scatter.default,
    aten.view.dtype,
    aten.view_as_complex.default,
    aten.view_as_real.default,
}
_NAMESPACES = {"aten", "prims", CONVOLUTION_BACKWARD.namespace}


def make_channels_last(module: fx.GraphModule, kept: Collection[int]) -> None:
    """Changes a graph as the module's docstring says.

    Args:
        module: Functional, its nodes with values; its outputs are nodes.
        kept: Which outputs have the strides that they were traced with.
    """
    graph = module.graph
    calls = [node for node in graph.nodes if node.op == "call_function"]
    if not any(map(_gains, calls)):
        return
    layouts = _Layouts(graph)
    for node in calls:
        layouts.visit(node)
    output = graph.output_node()
    results: Any = output.args[0]
    with graph.inserting_before(output):
        found = [layouts.traced(x) if i in kept else x for i, x in enumerate(results)]
    output.args = (tuple(found),)
    module.recompile()


def make_weights_dense(graph: fx.Graph) -> None:
    """Copies weights and biases of convolutions that have gaps or are expanded.

    Inductor (torch 2.13) packs constants as if they were dense, and reads beyond their memory.

    Args:
        graph: Changed in place; its nodes have values.
    """
    infer = ShapeInference()
    for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
        for place in (1, 2):
            weight = node.args[place]
            if weight is not None and dense_order(weight.meta["val"]) is None:
                with graph.inserting_before(node):
                    settings = {"memory_format": torch.contiguous_format}
                    dense = infer.insert_call(graph, aten.clone.default, weight, **settings)
                node.update_arg(place, dense)


def _gains(node: fx.Node) -> bool:
    """Returns whether a call is faster channels last."""
    return node.target in _FASTER and is_image_on_cpu(node.all_input_nodes[0].meta["val"])


def _depends_on_order(node: fx.Node) -> bool:
    """Returns whether a call gives something else where its arguments have other strides."""
    if not isinstance(node.target, private.OpOverload):
        return False  # items of tuples
    foreign = node.target.namespace not in _NAMESPACES
    return foreign or node.target in _READ_STRIDES or is_random(node)


class _Layouts:
    """The memory layouts of a graph's values."""

    def __init__(self, graph: fx.Graph):
        self._graph = graph
        self._infer = ShapeInference()
        self._traced: dict[fx.Node, Any] = {}
        self._converted: dict[fx.Node, fx.Node] = {}

    def visit(self, node: fx.Node) -> None:
        """Gives a call the layouts that suit it, and its value anew if these are others."""
        with self._graph.inserting_before(node):
            if _gains(node):
                node.args = fx.map_arg(node.args, self._channels_last)
            elif _depends_on_order(node):
                node.args = fx.map_arg(node.args, self.traced)
                if is_random(node):
                    node.target = keep_stride_order(node.target)
        if not any(source in self._traced for source in node.all_input_nodes):
            return
        if node.target is aten.view.default:
            node.target = aten.reshape.default
        before = node.meta["val"]
        self._infer(node)
        if _strides(node.meta["val"]) != _strides(before):
            self._traced[node] = before

    def _channels_last(self, node: fx.Node) -> fx.Node:
        value = node.meta["val"]
        layout = torch.channels_last
        if value.ndim != 4 or value.is_contiguous(memory_format=layout):
            return node
        if node not in self._converted:
            self._converted[node] = self._clone(node, memory_format=layout)
            self._traced[self._converted[node]] = value
        return self._converted[node]

    def traced(self, node: fx.Node) -> fx.Node:
        """Returns a tensor with the strides that it was traced with."""
        if node not in self._traced:
            return node
        strides = self._traced[node].stride()
        order = sorted(range(len(strides)), key=strides.__getitem__, reverse=True)
        inverse = sorted(range(len(strides)), key=order.__getitem__)
        if order == inverse == list(range(len(strides))):
            return self._clone(node, memory_format=torch.contiguous_format)
        moved = self._clone(self._permute(node, order), memory_format=torch.contiguous_format)
        return self._permute(moved, inverse)

    def _clone(self, node: fx.Node, **settings: Any) -> fx.Node:
        return self._infer.insert_call(self._graph, aten.clone.default, node, **settings)

    def _permute(self, node: fx.Node, order: Sequence[int]) -> fx.Node:
        return self._infer.insert_call(self._graph, aten.permute.default, node, list(order))


def _strides(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.stride()
    return [_strides(x) for x in value] if isinstance(value, (tuple, list)) else None

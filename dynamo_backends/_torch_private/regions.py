"""Regions marked by `torch.compiler.nested_compile_region`, of which Dynamo captures one graph.

Dynamo and AOT Autograd trace a region once. Each call of it is a call of the higher-order operator
`invoke_subgraph`, which backends do not compile.

| what | checked |
|---|---|
| `torch._higher_order_ops.invoke_subgraph.invoke_subgraph`, its arguments | 2.11+ |
| `torch._higher_order_ops.invoke_subgraph.invoke_subgraph_placeholder` | 2.11+ |
| `fx.Node._dynamo_source` | 2.11+ |
| `nn.Module._call_impl`, `._compiled_call_impl` | 2.11+ |
"""

import contextlib
import importlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._higher_order_ops import invoke_subgraph as _operator
from torch._ops import HigherOrderOperator


def calls_regions(module: fx.GraphModule) -> bool:
    """Returns whether a graph, or a graph that one of its operators calls, calls a region."""
    return any(
        graph_module.graph.find_nodes(op="call_function", target=_operator, sort=False)
        for graph_module in module.modules()
        if isinstance(graph_module, fx.GraphModule)
    )


def calls_graphs(graph: fx.Graph) -> bool:
    """Returns whether a graph calls a higher-order operator."""
    return any(isinstance(node.target, HigherOrderOperator) for node in graph.nodes)


def inline_regions(module: fx.GraphModule) -> fx.GraphModule:
    """Returns a graph with the calls of each region in place of the region's call.

    Args:
        module: A graph from Dynamo or AOT Autograd; it is not changed.

    Returns:
        A new module with the metadata of the given one, or the given one if it calls no region.
    """
    if not calls_regions(module):
        return module
    inliner = _Inliner()
    outputs = inliner.copy(module, None)
    inliner.graph.output(outputs)
    inliner.graph.output_node().meta = dict(module.graph.output_node().meta)
    return _like(module, inliner.attributes, inliner.graph)


def call_region(
    captured: fx.GraphModule,
    layers: Sequence[Sequence[fx.Node]],
    operands: Sequence[Sequence[fx.Node]],
    results: Sequence[int],
) -> fx.GraphModule:
    """Returns a copy of a graph of Dynamo's with calls of one region in place of equal layers.

    Args:
        captured: The graph; it is not changed.
        layers: The calls of each layer, in order, without others in between.
        operands: What layers read: for each operand, a node for each layer.
        results: Which calls of a layer others read, by their numbers.
    """
    region, graph = fx.Graph(), fx.Graph()
    inner: dict[fx.Node, fx.Node] = {}
    for read in operands:
        inner[read[0]] = region.placeholder(read[0].name)
        inner[read[0]].meta = dict(read[0].meta)
    for node in layers[0]:
        inner[node] = region.node_copy(node, inner.__getitem__)
    region.output(tuple(inner[layers[0][i]] for i in results))
    module = fx.GraphModule({}, region)
    firsts = {layer[0]: number for number, layer in enumerate(layers)}
    replaced = {node for layer in layers for node in layer}
    copies: dict[fx.Node, fx.Node] = {}
    for node in captured.graph.nodes:
        if node in firsts:
            layer = layers[firsts[node]]
            given = [copies[read[firsts[node]]] for read in operands]
            called = graph.call_function(_operator, (graph.get_attr(_LAYER), _LAYER, *given))
            called.meta["example_value"] = tuple(layer[i].meta["example_value"] for i in results)
            for place, i in enumerate(results):
                copies[layer[i]] = graph.call_function(operator.getitem, (called, place))
                copies[layer[i]].meta = dict(layer[i].meta)
        elif node not in replaced:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if hasattr(node, "_dynamo_source"):
                copies[node]._dynamo_source = node._dynamo_source
    return _like(captured, {_LAYER: module}, graph)


def _like(module: fx.GraphModule, attributes: Mapping[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """Returns a module with another graph, and what else there is to know of the given one."""
    result = fx.GraphModule(dict(attributes), graph, type(module).__name__)
    for name, value in vars(module).items():
        if name not in vars(result):
            setattr(result, name, value)
    result.training = module.training
    result.meta.update(module.meta)
    return result


_LAYER = "dynamo_backends_layer"


class _Inliner:
    """Copies graphs into one.

    Attributes:
        graph: What they are copied into.
        attributes: What that reads, by name.
    """

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.attributes: dict[str, Any] = {}

    def copy(self, module: fx.GraphModule, operands: tuple[Any, ...] | None) -> Any:
        """Copies a graph and returns its outputs.

        Args:
            module: The graph.
            operands: Values of its placeholders; None: the placeholders are copied, too.
        """
        values: dict[fx.Node, Any] = {}
        given = None if operands is None else iter(operands)
        for node in module.graph.nodes:
            if node.op == "output":
                return fx.map_arg(node.args[0], values.__getitem__)
            if node.op == "placeholder" and given is not None:
                values[node] = next(given)
            elif node.op == "get_attr" and all(user.target is _operator for user in node.users):
                continue  # a region
            elif node.target is _operator:
                region = _attribute(module, node.args[0])
                values[node] = self.copy(
                    region, fx.map_arg(tuple(node.args[2:]), values.__getitem__)
                )
            elif _reads_number(node) and not _is_tensor(values[node.args[0]]):
                # With dynamic=True torch 2.13 passes a tensor to the first call of a region, and
                # to later ones the number in it.
                values[node] = values[node.args[0]]
            elif node.target is operator.getitem and node.args[0].target is _operator:
                values[node] = values[node.args[0]][node.args[1]]
            else:
                values[node] = self._copy_node(module, node, values.__getitem__)
        raise AssertionError("a graph without an output")

    def _copy_node(
        self, module: fx.GraphModule, node: fx.Node, value: Callable[[fx.Node], Any]
    ) -> fx.Node:
        copied = self.graph.node_copy(node, value)
        if node.op in ("get_attr", "call_module"):
            copied.target = self._add_attribute(str(node.target), _attribute(module, node))
        if hasattr(node, "_dynamo_source"):
            copied._dynamo_source = node._dynamo_source
        return copied

    def _add_attribute(self, name: str, value: Any) -> str:
        """Adds what the graph reads; returns its name, which is another one if that is taken."""
        if isinstance(value, fx.GraphModule):
            value = inline_regions(value)
        unique, number = name, 0
        while unique in self.attributes and self.attributes[unique] is not value:
            number += 1
            unique = f"{name.replace('.', '_')}_{number}"
        self.attributes[unique] = value
        return unique


def _reads_number(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target == "item"


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and not _reads_number(value)


def _attribute(module: fx.GraphModule, node: Any) -> Any:
    return operator.attrgetter(str(node.target))(module)


def compile_module(module: nn.Module, **settings: Any) -> None:
    """As `nn.Module.compile`, also for modules of torch's, whose code Dynamo captures in no frame.

    Args:
        module: The module.
        settings: As for `torch.compile`.
    """
    if type(module).forward.__module__.partition(".")[0] != "torch":
        module.compile(**settings)
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    module._compiled_call_impl = torch.compile(call, **settings)


@contextlib.contextmanager
def without_regions() -> Iterator[None]:
    """Inside: tracers other than Dynamo, such as `torch.export`, trace a region as if unmarked."""
    module = importlib.import_module("torch._higher_order_ops.invoke_subgraph")
    with mock.patch.object(module, "invoke_subgraph_placeholder", _called):
        yield


def _called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)

"""Reads what Dynamo and AOT Autograd note in the graphs that they make.

| what | checked |
|---|---|
| `torch._functorch._aot_autograd.descriptors`: `PlainAOTInput`, ... | 2.11+ |
| `fx.Node._dynamo_source`, `fx.Node.meta["tensor_dict"]` | 2.11+ |
| `torch.fx.node`: `has_side_effect`, `_get_qualified_name` | 2.11+ |
| `torch.fx._lazy_graph_module`: `_LazyGraphModule` | 2.13.0 |
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import has_side_effect as has_side_effect


def _unwrapped(desc: Any) -> Any:
    """Returns what is known of an input or output, of a wrapper if it is the only tensor in one."""
    return desc.base if type(desc).__name__ in _INNER and desc.attr == ONLY else desc


ONLY = "_handle"
"""The attribute of wrappers with one tensor."""


def dynamo_input_index(placeholder: fx.Node) -> int | None:
    """Returns the index among Dynamo's inputs of an AOT graph's placeholder, or None."""
    desc = _unwrapped(placeholder.meta.get("desc"))
    return getattr(desc, "idx", None) if is_dynamo_input(placeholder) else None


def wrapper_input_index(placeholder: fx.Node) -> int | None:
    """Returns the index of the Dynamo input, maybe a wrapper, a placeholder is part of."""
    desc = _outermost(placeholder.meta.get("desc"))
    return getattr(desc, "idx", None) if type(desc).__name__ == "PlainAOTInput" else None


def mutated_dynamo_inputs(graph: fx.Graph) -> frozenset[int]:
    """Returns indices of the Dynamo inputs that a graph mutates, in whole or in part."""
    descs = map(_outermost, graph.output_node().meta.get("desc") or ())
    found = [mutated_input_index(desc) for desc in descs]
    return frozenset(i for i in found if i is not None)


def _outermost(desc: Any) -> Any:
    while type(desc).__name__ in _INNER:
        desc = desc.base
    return desc


_INNER = ("SubclassGetAttrAOTInput", "SubclassGetAttrAOTOutput")


def view_base_input_index(placeholder: fx.Node) -> int | None:
    """Returns a placeholder's Dynamo input; for a base of views, the first view's."""
    return _index(placeholder.meta.get("desc"))


def _index(desc: Any) -> int | None:
    desc = _unwrapped(desc)
    while (base := getattr(desc, "base_of", None)) is not None:
        desc = base
    return getattr(desc, "idx", None) if type(desc).__name__ == "PlainAOTInput" else None


def dynamo_source_name(placeholder: fx.Node) -> str | None:
    """Returns a placeholder's source in the user's code: "L['self']._modules['fc']"."""
    source = getattr(placeholder, "_dynamo_source", None)
    return source.name if source is not None else None


def generated_forward(module: fx.GraphModule) -> Callable[..., Any]:
    """Returns a module's generated `forward`, which prints nothing when it raises."""
    _LazyGraphModule.force_recompile(module)
    forward: Callable[..., Any] = module.forward
    return forward


def lazy_graph_module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """Makes a module whose Python code is generated when it is first called or read.

    Args:
        root: Has the attributes that the graph reads.
        graph: What it runs.
    """
    return _LazyGraphModule(root, graph)


def copy_captured(captured: fx.GraphModule) -> fx.GraphModule:
    """Copies a graph of Dynamo's with the sources and metadata that AOT Autograd reads."""
    nodes: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    graph.output(graph.graph_copy(captured.graph, nodes))
    graph.output_node().meta = dict(captured.graph.output_node().meta)
    for node, copied in nodes.items():
        if hasattr(node, "_dynamo_source"):
            copied._dynamo_source = node._dynamo_source
    result = fx.GraphModule(captured, graph)
    for name, value in vars(captured).items():
        if name not in vars(result):
            setattr(result, name, value)
    result.meta.update(captured.meta)
    return result


def captured_static_inputs(captured: fx.GraphModule) -> frozenset[int]:
    """Returns the indices of a captured graph's parameters and buffers."""
    return frozenset(
        i
        for i, node in enumerate(captured.graph.find_nodes(op="placeholder"))
        if node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
    )


def has_flattened_subclasses(graph: fx.Graph) -> bool:
    """Returns whether inputs are inner tensors of subclasses with other attributes."""
    descs = [p.meta.get("desc") for p in graph.find_nodes(op="placeholder")]
    return any(type(x).__name__ in _INNER and x.attr != ONLY for x in descs)


def function_name(function: Callable[..., Any]) -> str:
    """Returns the name by which a function can be imported, such as "torch.conv2d"."""
    from torch.fx.node import _get_qualified_name

    return _get_qualified_name(function)


def is_dynamo_input(placeholder: fx.Node) -> bool:
    """Returns whether an AOT graph's placeholder is one of Dynamo's inputs as it is."""
    return type(_unwrapped(placeholder.meta.get("desc"))).__name__ == "PlainAOTInput"


def is_tangent(placeholder: fx.Node) -> bool:
    """Returns whether a placeholder of an AOT backward graph is an incoming gradient."""
    return type(_unwrapped(placeholder.meta.get("desc"))).__name__ == "TangentAOTInput"


def updated_inputs(graph: fx.Graph) -> dict[int, Any]:
    """Returns the new values of mutated Dynamo inputs, by their indices.

    A base that several views have in common counts as the first of these.
    """
    output = graph.output_node()
    descs = output.meta.get("desc") or ()
    updated = [_index(getattr(_unwrapped(desc), "mutated_input", None)) for desc in descs]
    values: Any = output.args[0]
    return {i: v for i, v in zip(updated, values, strict=False) if i is not None}


def mutated_input_index(desc: Any) -> int | None:
    """Returns the Dynamo input that an AOT output mutates, by its `desc`; else None."""
    desc = _unwrapped(desc)
    if type(desc).__name__ != "InputMutationAOTOutput":
        return None
    return getattr(desc.mutated_input, "idx", None)


def output_index(desc: Any) -> int | None:
    """Returns an AOT output's index among Dynamo's outputs, by its `desc`; else None."""
    desc = _unwrapped(desc)
    return getattr(desc, "idx", None) if type(desc).__name__ == "PlainAOTOutput" else None

"""Small graphs of ATen calls in types that JSON has: the parts of a linked program in eager."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.errors import PackageError
from dynamo_backends.package.checks import check_target, named_target

_KINDS = (torch.dtype, torch.layout, torch.memory_format)
SCALARS = (bool, int, float, str, type(None))


def to_dict(graph: Graph) -> dict[str, Any] | None:
    """A graph; None: it has a call or an argument that has no form here."""
    if any(node.op == "get_attr" for node in graph.module.graph.nodes):
        return None
    calls = []
    for node in graph.calls:
        target = named_target(node.target)
        try:
            args = [_encoded(x) for x in node.args]
            kwargs = {key: _encoded(x) for key, x in node.kwargs.items()}
        except PackageError:
            return None
        if target is None:
            return None
        calls.append({"name": node.name, "target": target, "args": args, "kwargs": kwargs})
    results = [x.name for x in graph.outputs if isinstance(x, fx.Node)]
    if len(results) != len(graph.outputs):
        return None
    return {"inputs": [n.name for n in graph.placeholders], "calls": calls, "results": results}


def from_dict(given: Mapping[str, Any]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What runs a graph, from one value per input to its results.

    Raises:
        PackageError: It calls what is no operator, or names no value.
    """
    graph = fx.Graph()
    nodes = {name: graph.placeholder(name) for name in given["inputs"]}
    for call in given["calls"]:
        check_target(call["target"])
        args = tuple(_decoded(x, nodes) for x in call["args"])
        kwargs = {key: _decoded(x, nodes) for key, x in call["kwargs"].items()}
        nodes[call["name"]] = graph.call_function(_target(call["target"]), args, kwargs)
    graph.output(tuple(nodes[name] for name in given["results"]))
    module = fx.GraphModule(torch.nn.Module(), graph)
    return lambda values: module(*values)


def _encoded(value: Any) -> dict[str, Any]:
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, list | tuple):
        return {"list": [_encoded(x) for x in value]}
    if isinstance(value, _KINDS):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if type(value) in SCALARS:
        return {"value": value}
    raise PackageError(f"a {type(value).__name__} is no argument that JSON has")


def _decoded(given: Mapping[str, Any], nodes: Mapping[str, fx.Node]) -> Any:
    ((kind, value),) = given.items()
    if kind == "node":
        return nodes[value]
    if kind == "list":
        return [_decoded(x, nodes) for x in value]
    if kind == "torch":
        found = getattr(torch, value, None)
        if isinstance(found, _KINDS):
            return found
    elif kind == "device":
        return torch.device(value)
    elif kind == "value" and isinstance(value, SCALARS):
        return value
    raise PackageError(f"the graph has an argument {kind}={value!r}, which no package has")


def _target(name: str) -> Any:
    """What a name that `check_target` has allowed stands for."""
    import math
    import operator

    found: Any = {"torch": torch, "_operator": operator, "math": math}[name.partition(".")[0]]
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    return found

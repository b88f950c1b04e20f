"""Small graphs of ATen calls in types that JSON has: the parts of a linked program in eager."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from dynamo_backends.graph.position_checks import InputCheck, PositionChecks
from dynamo_backends.interface.errors import PackageError
from dynamo_backends.package.checks import check_target, named_target

_KINDS = (torch.dtype, torch.layout, torch.memory_format)
SCALARS = (bool, int, float, str, type(None))


def to_dict(graph: fx.Graph) -> dict[str, Any] | None:
    """Returns a graph; None: it has a call or an argument that has no form here."""
    if any(node.op == "get_attr" for node in graph.nodes):
        return None
    calls = []
    for node in (n for n in graph.nodes if n.op == "call_function"):
        target = named_target(node.target)
        try:
            args = [encoded(x) for x in node.args]
            kwargs = {key: encoded(x) for key, x in node.kwargs.items()}
        except PackageError:
            return None
        if target is None:
            return None
        calls.append({"name": node.name, "target": target, "args": args, "kwargs": kwargs})
    outputs: Any = graph.output_node().args[0]
    if not all(isinstance(x, (fx.Node, *SCALARS)) for x in outputs):
        return None
    results = [x.name if isinstance(x, fx.Node) else encoded(x) for x in outputs]
    inputs = [n.name for n in graph.nodes if n.op == "placeholder"]
    return {"inputs": inputs, "calls": calls, "results": results}


def from_dict(given: Mapping[str, Any]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Returns what runs a graph, from one value per input to its results.

    Raises:
        PackageError: It calls what is no operator, or names no value.
    """
    module = module_of(given)
    return lambda values: module(*values)


def module_of(given: Mapping[str, Any]) -> fx.GraphModule:
    """Returns a graph, whose calls have no `meta`.

    Raises:
        PackageError: It calls what is no operator, or names no value.
    """
    graph = fx.Graph()
    nodes = {name: graph.placeholder(name) for name in given["inputs"]}
    for call in given["calls"]:
        args = tuple(decoded(x, nodes) for x in call["args"])
        kwargs = {key: decoded(x, nodes) for key, x in call["kwargs"].items()}
        nodes[call["name"]] = graph.call_function(target_of(call["target"]), args, kwargs)
    results = [nodes[x] if isinstance(x, str) else decoded(x, nodes) for x in given["results"]]
    graph.output(tuple(results))
    return fx.GraphModule(torch.nn.Module(), graph)


def checks_to_dict(checks: PositionChecks | None) -> dict[str, Any] | None:
    """What is checked of a call; None: it has something that has no form here."""
    if checks is None or checks.before is None:
        return {"flag": None if checks is None else checks.flag, "before": None}
    before = checks.before
    made = to_dict(before.module.graph)
    if made is None or before.constants:
        return None
    stated = {"reads": before.reads, "calls": made, "stable": before.stable}
    return {"flag": checks.flag, "before": stated}


def checks_from_dict(given: Mapping[str, Any]) -> tuple[InputCheck | None, int | None]:
    """What `checks_to_dict` was given: the check before a call, and the position of the flag.

    Raises:
        PackageError: It calls what is no operator, or names no value.
    """
    stated = given["before"]
    if stated is None:
        return None, given["flag"]
    module = module_of(stated["calls"])
    return InputCheck(tuple(stated["reads"]), module, tuple(stated["stable"])), given["flag"]


def encoded(value: Any) -> dict[str, Any]:
    """Returns an argument of a call; `decoded` reverses that.

    Raises:
        PackageError: It has no form here.
    """
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, list | tuple):
        return {"list": [encoded(x) for x in value]}
    if isinstance(value, _KINDS):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if type(value) in SCALARS:
        return {"value": value}
    raise PackageError(f"a {type(value).__name__} is no argument that JSON has")


def decoded(given: Mapping[str, Any], nodes: Mapping[str, fx.Node]) -> Any:
    """The argument that `encoded` was given.

    Args:
        given: Its form.
        nodes: By name.

    Raises:
        PackageError: It is none that `encoded` makes.
    """
    ((kind, value),) = given.items()
    if kind == "node":
        return nodes[value]
    if kind == "list":
        return [decoded(x, nodes) for x in value]
    if kind == "torch":
        found = getattr(torch, value, None)
        if isinstance(found, _KINDS):
            return found
    elif kind == "device":
        return torch.device(value)
    elif kind == "value" and isinstance(value, SCALARS):
        return value
    raise PackageError(f"the graph has an argument {kind}={value!r}, which no package has")


def target_of(name: str) -> Any:
    """Returns what the name of a target stands for.

    Raises:
        PackageError: It is no operator.
    """
    import math
    import operator

    check_target(name)
    found: Any = {"torch": torch, "_operator": operator, "math": math}[name.partition(".")[0]]
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    return found

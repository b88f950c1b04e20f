"""Small graphs of ATen calls as text: parts of a linked program in eager, checks, random draws."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from dynamo_backends._torch_private import graph_serialization
from dynamo_backends.graph.index_checks import IndexCheckedGraph, InputCheck
from dynamo_backends.graph.random_draws import draw
from dynamo_backends.interface.errors import PackageError, brief_error

SCALARS = (bool, int, float, str, type(None))
_DRAWS = frozenset(("bernoulli_", "exponential_", "normal_", "random_", "uniform_"))
_FUNCTIONS = graph_serialization.make_function_table({"getitem": operator.getitem, "draw": draw})


def to_text(graph: fx.Graph) -> str | None:
    """Serializes a small FX graph; returns None if it cannot be serialized."""
    if any(node.op == "get_attr" for node in graph.nodes):
        return None
    try:
        return graph_serialization.graph_to_text(graph, _FUNCTIONS)
    except graph_serialization.UnserializableError:
        return None


def call_to_text(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Returns a graph of one call without inputs; see `to_text`."""
    graph = fx.Graph()
    graph.output((graph.call_function(target, tuple(args), dict(kwargs)),))
    return to_text(graph)


def module_of(text: str) -> fx.GraphModule:
    """Returns a graph, whose calls have no `meta`.

    Raises:
        PackageError: It calls what is no operator, names no value, or is no graph.
    """
    try:
        graph = graph_serialization.graph_from_text(text, _FUNCTIONS)
        module = fx.GraphModule(torch.nn.Module(), graph)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise PackageError(f"a graph of the package is invalid: {brief_error(error)}") from error
    for node in graph.find_nodes(op="call_function", target=draw):
        if node.args[0] not in _DRAWS:
            raise PackageError(
                f"the step draws random numbers with {node.args[0]!r}, which packages do not "
                "support"
            )
    return module


def deserialize_callable(text: str) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Deserializes a graph from `to_text` into a function from inputs to results."""
    module = module_of(text)
    return lambda values: module(*values)


def checks_to_dict(checks: IndexCheckedGraph | None) -> dict[str, Any] | None:
    """Returns what is checked of a call; None: it has something that has no form here."""
    if checks is None or checks.before is None:
        return {"flag": None if checks is None else checks.flag, "before": None}
    before = checks.before
    made = to_text(before.module.graph)
    if made is None or before.constants:
        return None
    stated = {"reads": before.reads, "calls": made, "stable": before.stable}
    return {"flag": checks.flag, "before": stated}


def checks_from_dict(given: Mapping[str, Any]) -> tuple[InputCheck | None, int | None]:
    """Returns what `checks_to_dict` was given: the check, and the position of the flag.

    Raises:
        PackageError: It calls what is no operator, or names no value.
    """
    stated = given["before"]
    if stated is None:
        return None, given["flag"]
    module = module_of(stated["calls"])
    return InputCheck(tuple(stated["reads"]), module, tuple(stated["stable"])), given["flag"]

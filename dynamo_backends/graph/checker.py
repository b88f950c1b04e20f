"""Checks the properties of the normal form (`graph.properties`)."""

import functools
import math
import operator
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import HigherOrderOperator, OpOverload, is_composite
from dynamo_backends.graph.aliasing import find_aliased_outputs
from dynamo_backends.graph.canonicalize import canonicalize
from dynamo_backends.graph.decomposition_tables import decomposition_table
from dynamo_backends.graph.graph import Graph, Role
from dynamo_backends.graph.properties import NORMAL_FORM, Property
from dynamo_backends.graph.random_draws import DRAWS, draws_like_tensor, is_random
from dynamo_backends.graph.shape_propagation import (
    find_data_dependent_calls,
    find_metadata_mismatches,
)
from dynamo_backends.graph.symbolic_sizes import is_symbolic
from dynamo_backends.interface.errors import NormalFormError


@functools.cache
def _functions() -> frozenset[Callable[..., Any]]:
    """Returns the Python functions allowed as targets: draws, `sym_*`, arithmetic."""
    symbolic = [getattr(torch, name) for name in dir(torch) if name.startswith("sym_")]
    arithmetic = [f for m in (operator, math) for f in vars(m).values() if callable(f)]
    return frozenset((*DRAWS, *symbolic, *arithmetic, round))


def non_dialect_reason(node: fx.Node, keep: Collection[OpOverload] | None = None) -> str | None:
    """Returns why a call is not allowed in the normal form; None if it is.

    Args:
        node: A `call_function` node.
        keep: What the backend takes whole; None: do not ask whether the call is decomposed.
    """
    target = node.target
    if isinstance(target, OpOverload):
        if keep is not None and target in decomposition_table(()) and target not in keep:
            return f"{target} is composite and was not decomposed"
        if is_composite(target) and not target._schema.name.startswith("aten::sym_"):
            return f"{target} is CompositeImplicitAutograd, which torch decomposes while tracing"
        return None
    if isinstance(target, HigherOrderOperator) or target in _functions():
        return None
    return f"{target} is not an operator overload"


def is_mutating_call(node: fx.Node) -> bool:
    """Returns whether a call's schema says that it mutates an argument."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


_SHOWN = 5


def check(
    graph: Graph, properties: Collection[Property] = NORMAL_FORM, when: str = "in an explicit check"
) -> None:
    """Raises `NormalFormError` if a graph lacks any of the properties; changes nothing.

    Args:
        graph: The graph.
        properties: What it has to have.
        when: Said in the message.

    Raises:
        NormalFormError: It lacks some; the message has the first violations of each.
    """
    found = [line for p in find_violations(graph, properties) for line in p]
    if found:
        listing = "\n  ".join(found)
        raise NormalFormError(
            f"{when}, a graph violates required properties. Please report this:\n  "
            f"{listing}\n{graph.text()}"
        )


def find_violations(graph: Graph, properties: Collection[Property]) -> Iterator[list[str]]:
    """Yields, for each property that a graph lacks, the messages with node names."""
    for each in Property:  # in order: later checks rely on earlier ones
        if each not in properties:
            continue
        found = list(_CHECKS[each](graph))
        if found:
            more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
            yield [f"{each.name}: {text}" for text in (*found[:_SHOWN], *more)]
            if each is Property.ORDERED:
                return


def _ordered(graph: Graph) -> Iterator[str]:
    try:
        graph.module.graph.lint()
    except RuntimeError as error:
        yield str(error)
    past_placeholders = False
    names: set[str] = set()
    for node in graph.module.graph.nodes:
        if node.name in names:
            yield f"two nodes have the name {node.name}"
        names.add(node.name)
        if node.op == "placeholder" and past_placeholders:
            yield f"placeholder {node.name} comes after a call"
        past_placeholders |= node.op != "placeholder"
    if not isinstance(graph.module.graph.output_node().args[0], list | tuple):
        yield "the output is not a sequence"


def _functional(graph: Graph) -> Iterator[str]:
    for node in graph.calls:
        if is_mutating_call(node):
            yield f"{node.name}: {node.target} writes to an argument"


def _dialect(graph: Graph) -> Iterator[str]:
    for node in graph.module.graph.nodes:
        if node.op in ("call_method", "call_module"):
            yield f"{node.name} is a {node.op}"
        elif node.op == "call_function":
            reason = non_dialect_reason(node)
            if reason is not None:
                yield f"{node.name}: {reason}"


def _roles(graph: Graph) -> Iterator[str]:
    names = [p.name for p in graph.placeholders]
    inputs = [x.name for x in graph.inputs]
    if names != inputs:
        yield f"placeholders {names} do not match inputs {inputs}"
        return
    for place, x in zip(graph.placeholders, graph.inputs, strict=True):
        if (x.role is Role.SYMBOL) == isinstance(place.meta.get("val"), Tensor):
            yield f"{x.name} has the role {x.role.value} and the value {place.meta.get('val')}"
        if x.frozen and graph.kind != "inference":
            yield f"{x.name} is frozen in a {graph.kind} graph"
    for node in graph.module.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(graph.module, node.target, None), Tensor):
            yield f"the constant {node.name} is not a placeholder"


def _typed(graph: Graph) -> Iterator[str]:
    return find_metadata_mismatches(graph)


def _live(graph: Graph) -> Iterator[str]:
    for node in graph.calls:
        if not node.users and not node.is_impure():
            yield f"{node.name} is unused"


def _canonical(graph: Graph) -> Iterator[str]:
    copy = graph.copy()
    before = {node.name: node.format_node() for node in copy.calls}
    if canonicalize(copy):
        after = {node.name: node.format_node() for node in copy.calls}
        for name, text in before.items():
            if after.get(name) != text:
                yield f"{text} should be {after.get(name, 'left out')}"


def _static(graph: Graph) -> Iterator[str]:
    dependent = find_data_dependent_calls(graph)
    for node in (*graph.placeholders, *graph.calls):
        if is_symbolic(node.meta.get("val")) and node not in dependent:
            yield f"{node.name} has symbolic sizes"


def _draws_apart(graph: Graph) -> Iterator[str]:
    for node in graph.calls:
        if is_random(node) and draws_like_tensor(node):
            yield (
                f"{node.name} draws random numbers in the shape of a tensor whose values it does "
                "not need"
            )


def _outputs_apart(graph: Graph) -> Iterator[str]:
    for i, base in find_aliased_outputs(graph).items():
        yield f"output {i} shares storage with another output, {base.name}"


_CHECKS: dict[Property, Callable[[Graph], Iterator[str]]] = {
    Property.ORDERED: _ordered,
    Property.FUNCTIONAL: _functional,
    Property.DIALECT: _dialect,
    Property.ROLES: _roles,
    Property.TYPED: _typed,
    Property.LIVE: _live,
    Property.CANONICAL: _canonical,
    Property.STATIC: _static,
    Property.DRAWS_APART: _draws_apart,
    Property.OUTPUTS_APART: _outputs_apart,
}

"""Sequences of passes, and the checks of the normal form's properties between them.

A pass changes a graph in place and says whether it did (`graph.properties`). A `PassSequence` is
refused when it is made if a pass would run on a graph that does not have what the pass requires.
With `DYNAMO_BACKENDS_CHECK=1` every pass that changed the graph is followed by the checks of all
properties that hold at that point; the tests run this way.
"""

import functools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import HigherOrderOperator, OpOverload, is_composite
from dynamo_backends.graph.aliasing import outputs_to_replay
from dynamo_backends.graph.canonicalize import canonicalize
from dynamo_backends.graph.decompositions import decompositions
from dynamo_backends.graph.graph import Graph, Role
from dynamo_backends.graph.propagate import data_dependent, mismatches
from dynamo_backends.graph.properties import NORMAL_FORM, Pass, Property
from dynamo_backends.graph.random import DRAWS, is_bound_to_data, is_random
from dynamo_backends.graph.sizes import is_symbolic
from dynamo_backends.interface.errors import NormalFormError, checks_enabled

unchecked = ContextVar("unchecked", default=False)
"""See `check_if_enabled`."""


class PassSequence:
    """Passes in the order in which they run.

    Args:
        passes: The passes.
        given: What holds before the first.

    Raises:
        ValueError: A pass requires what nothing before it ensures.
    """

    def __init__(self, passes: Iterable[Pass], given: frozenset[Property]):
        self.passes = tuple(passes)
        self.given = given
        holds = given
        for each in self.passes:
            missing = each.requires - holds
            if missing:
                names = ", ".join(sorted(p.name for p in missing))
                raise ValueError(f"nothing before the pass {each.name!r} ensures {names}")
            holds |= each.ensures
        self.ensures = holds

    def __call__(
        self, graph: Graph, after: Callable[[Pass, Graph, bool], None] | None = None
    ) -> bool:
        """Runs the passes in order on a graph.

        Args:
            graph: Changed in place.
            after: Called after each pass with the pass, the graph, and whether it changed.

        Returns:
            Whether any pass changed the graph.

        Raises:
            NormalFormError: Under `DYNAMO_BACKENDS_CHECK=1`, if a pass left a graph without a
                property that should hold.
        """
        holds, changed = self.given, False
        check_if_enabled(graph, holds, "before the first pass")
        for each in self.passes:
            try:
                changed_here = each.run(graph)
            except Exception as error:
                error.add_note(f"in the pass {each.name!r}")
                raise
            changed |= changed_here
            holds |= each.ensures
            asked = holds if changed_here else each.ensures
            check_if_enabled(graph, asked, f"after the pass {each.name!r}")
            if after is not None:
                after(each, graph, changed_here)
        if changed:
            graph.module.recompile()
        return changed


def check_if_enabled(graph: Graph, properties: frozenset[Property], when: str) -> None:
    """Checks a graph (see `checker.check`) if `checks_enabled()`.

    Checking runs operators on fake tensors, whose mode other threads may use at the same time. So
    graphs are not checked in threads in which `unchecked` is true.
    """
    if checks_enabled() and not unchecked.get():
        check(graph, properties, when)


@functools.cache
def _functions() -> frozenset[Callable[..., Any]]:
    """Python functions of the dialect."""
    symbolic = [getattr(torch, name) for name in dir(torch) if name.startswith("sym_")]
    arithmetic = [f for m in (operator, math) for f in vars(m).values() if callable(f)]
    return frozenset((*DRAWS, *symbolic, *arithmetic))


def why_not(node: fx.Node, keep: Collection[OpOverload] | None = None) -> str | None:
    """Returns why a call is not of the dialect; None if it is.

    Args:
        node: A `call_function` node.
        keep: What the backend takes whole; None: do not ask whether the call is decomposed.
    """
    target = node.target
    if isinstance(target, OpOverload):
        if keep is not None and target in decompositions(()) and target not in keep:
            return f"{target} is composite and was not decomposed"
        if is_composite(target) and not target._schema.name.startswith("aten::sym_"):
            return f"{target} is made of other operators; torch replaces it while tracing"
        return None
    if isinstance(target, HigherOrderOperator) or target in _functions():
        return None
    return f"{target} is not an operator overload"


def writes(node: fx.Node) -> bool:
    """Returns whether a call writes to one of its arguments."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


_SHOWN = 5


def check(
    graph: Graph, properties: Collection[Property] = NORMAL_FORM, when: str = "at the check"
) -> None:
    """Checks a graph; it is not changed.

    Args:
        graph: The graph.
        properties: What it has to have.
        when: Said in the message.

    Raises:
        NormalFormError: It lacks some; the message has the first violations of each.
    """
    found = [line for p in violations(graph, properties) for line in p]
    if found:
        listing = "\n  ".join(found)
        raise NormalFormError(
            f"{when}, a graph is not in the form that is expected:\n  {listing}\n{graph.text()}"
        )


def violations(graph: Graph, properties: Collection[Property]) -> Iterator[list[str]]:
    """Yields each property that a graph lacks, by name, with the place."""
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
            yield f"two nodes are called {node.name}"
        names.add(node.name)
        if node.op == "placeholder" and past_placeholders:
            yield f"placeholder {node.name} comes after a call"
        past_placeholders |= node.op != "placeholder"
    if not isinstance(graph.module.graph.output_node().args[0], list | tuple):
        yield "the output is not a sequence"


def _functional(graph: Graph) -> Iterator[str]:
    for node in graph.calls:
        if writes(node):
            yield f"{node.name}: {node.target} writes to an argument"


def _dialect(graph: Graph) -> Iterator[str]:
    for node in graph.module.graph.nodes:
        if node.op in ("call_method", "call_module"):
            yield f"{node.name} is a {node.op}"
        elif node.op == "call_function":
            reason = why_not(node)
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
    return mismatches(graph)


def _live(graph: Graph) -> Iterator[str]:
    for node in graph.calls:
        if not node.users and not node.is_impure():
            yield f"{node.name}: nobody reads it"


def _canonical(graph: Graph) -> Iterator[str]:
    copy = graph.copy()
    before = {node.name: node.format_node() for node in copy.calls}
    if canonicalize(copy):
        after = {node.name: node.format_node() for node in copy.calls}
        for name, text in before.items():
            if after.get(name) != text:
                yield f"{text} should be {after.get(name, 'left out')}"


def _static(graph: Graph) -> Iterator[str]:
    dependent = data_dependent(graph)
    for node in (*graph.placeholders, *graph.calls):
        if is_symbolic(node.meta.get("val")) and node not in dependent:
            yield f"{node.name} has symbolic sizes"


def _draws_apart(graph: Graph) -> Iterator[str]:
    for node in graph.calls:
        if is_random(node) and is_bound_to_data(node):
            yield f"{node.name} draws in the shape of a tensor that it need not wait for"


def _outputs_apart(graph: Graph) -> Iterator[str]:
    for i, base in outputs_to_replay(graph).items():
        yield f"output {i} shares the memory of {base.name} with another output"


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

"""Replaces single calls in a graph by simpler ones."""

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from dynamo_backends import _torch_private as private
from dynamo_backends.graph import symbolic_scalars
from dynamo_backends.graph.call_tracing import CallTraceCache
from dynamo_backends.graph.graph import Graph, copy_graph, erase_unused_calls
from dynamo_backends.graph.normalize import NORMALIZE
from dynamo_backends.graph.pass_sequence import PassSequence
from dynamo_backends.graph.shape_propagation import PROPAGATE
from dynamo_backends.graph.symbolic_sizes import SIZES, STRIDES
from dynamo_backends.interface.errors import LoweringError

ORIGIN = "expanded_from"
"""Key in a call's `meta`: name of the call that it was made for."""


def get_origin_name(node: fx.Node) -> str:
    """Returns the name of the call that a decomposition replaced; else the node's own name."""
    name: str = node.meta.get(ORIGIN, node.name)
    return name


def decompose_call(
    node: fx.Node, rules: Mapping[Any, Callable[..., Any]], traces: CallTraceCache | None = None
) -> None:
    """Replaces a call, in place, by its decomposition from `rules`.

    Args:
        node: The call.
        rules: Functions of an operator's arguments, by the operator; there is one of the call's,
            and those of others are used inside.
        traces: See `replace_call`.

    Raises:
        LoweringError: The rule does not lead to functional calls of other operators.
    """
    target: Any = node.target
    replace_call(node, target, rules, traces)


def decompose_graph(graph: Graph, rules: Mapping[Any, Callable[..., Any]]) -> Graph:
    """Copies a graph and decomposes every call for which `rules` has a decomposition.

    Args:
        graph: With static shapes; not changed.
        rules: Functions of an operator's arguments, by the operator. They may decline.

    Raises:
        LoweringError: A rule makes constants.
    """
    inputs = [p.meta["val"] for p in graph.placeholders]
    bare = fx.GraphModule(graph.module, graph.module.graph)
    with torch.no_grad(), private.keeping_unused_draws():
        traced, _ = private.functionalize_graph(bare, inputs, dict(rules))
    module = fx.GraphModule(traced, copy_graph(traced.graph))
    for node in module.graph.find_nodes(op="get_attr"):
        raise LoweringError(
            node.name, str(node.target), "its decomposition creates tensor constants"
        )
    places = module.graph.find_nodes(op="placeholder")
    named = [dataclasses.replace(x, name=p.name) for p, x in zip(places, graph.inputs, strict=True)]
    result = Graph(module, graph.kind, tuple(named))
    PassSequence((PROPAGATE,), given=NORMALIZE.ensures)(result)
    return result


def replace_call(
    node: fx.Node,
    function: Callable[..., Any],
    rules: Mapping[Any, Callable[..., Any]] | None = None,
    traces: CallTraceCache | None = None,
) -> None:
    """Replaces a call, in place, by the calls of a function traced on its arguments.

    Args:
        node: The call.
        function: See `insert_traced_calls`.
        rules: See `insert_traced_calls`.
        traces: See `insert_traced_calls`.

    Raises:
        LoweringError: See `insert_traced_calls`.
    """
    results, calls = _expand(node, function, rules, traces)
    graph = node.graph
    _put(node, results)
    # Parts of the decomposition that only compute results which nobody uses, and what they read.
    erase_unused_calls(graph, calls)


def insert_traced_calls(
    node: fx.Node,
    function: Callable[..., Any],
    rules: Mapping[Any, Callable[..., Any]] | None = None,
    traces: CallTraceCache | None = None,
) -> Any:
    """Inserts before a call what a function traced on its arguments calls; keeps the call.

    The new calls' `meta[ORIGIN]` names the old one, or what that one was made for.

    Args:
        node: The call.
        function: Takes its arguments.
        rules: What to decompose in turn: functions of an operator's arguments, by the operator.
        traces: Of other calls of the graph by the same rules. None: it is the only one.

    Returns:
        Nodes in the place of what the function returns.

    Raises:
        LoweringError: The function does not lead to functional calls, or not away from the
            operator that `rules` should have decomposed.
    """
    return _expand(node, function, rules, traces)[0]


def _expand(
    node: fx.Node,
    function: Callable[..., Any],
    rules: Mapping[Any, Callable[..., Any]] | None,
    traces: CallTraceCache | None,
) -> tuple[Any, list[fx.Node]]:
    graph = node.graph
    traced = (traces or CallTraceCache())(node, function, rules or {})
    if symbolic_scalars.has_hardcoded_sizes(traced):
        symbolic_scalars.note_hardcoded_size(graph)
    sources = iter(node.all_input_nodes)
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(node):
        for inner in traced.nodes:
            unresolved = inner.target is node.target and function is node.target
            if inner.op == "placeholder":
                copies[inner] = next(sources)
            elif inner.op == "call_function" and not unresolved:
                copies[inner] = graph.node_copy(inner, copies.__getitem__)
                known = {k: inner.meta[k] for k in ("val", SIZES, STRIDES) if k in inner.meta}
                copies[inner].meta = {**known, ORIGIN: get_origin_name(node)}
            elif inner.op != "output":
                reason = (
                    f"its decomposition contains {inner.target}, which the backend does not support"
                )
                raise LoweringError(node.name, str(node.target), reason)
    results = fx.map_arg(traced.output_node().args[0], copies.__getitem__)
    return results, list(copies.values())


def _put(node: fx.Node, results: Any) -> None:
    """Puts results in the place of a call."""
    if isinstance(results, fx.Node):
        _stand_in(results, node)
        node.replace_all_uses_with(results)
    else:
        for user in list(node.users):
            if user.target is not operator.getitem:
                raise LoweringError(node.name, str(node.target), "its results are used as a list")
            _stand_in(results[user.args[1]], user)
            user.replace_all_uses_with(results[user.args[1]])
            node.graph.erase_node(user)
    node.graph.erase_node(node)


def _stand_in(made: Any, node: fx.Node) -> None:
    """Leaves with a new call what is known of the sizes of the one whose place it takes."""
    if isinstance(made, fx.Node) and ORIGIN in made.meta and SIZES in node.meta:
        made.meta.setdefault(SIZES, node.meta[SIZES])

"""Compiles copies of graphs in which the calls are decomposed that a plan decomposes."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from torch import Tensor, fx

from dynamo_backends.graph.call_decomposition import ORIGIN, decompose_call
from dynamo_backends.graph.call_tracing import CallTraceCache
from dynamo_backends.graph.decomposition_tables import (
    all_decomposition_rules,
    nested_decomposition_table,
)
from dynamo_backends.graph.fingerprint import fingerprint
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import infer_layout
from dynamo_backends.graph.symbolic_scalars import has_hardcoded_sizes
from dynamo_backends.graph.symbolic_sizes import SIZES, STRIDES, drop_size_expressions
from dynamo_backends.interface.backend import Backend
from dynamo_backends.interface.errors import LoweringError
from dynamo_backends.interface.options import Options
from dynamo_backends.interface.plan import Plan

T = TypeVar("T")
Rules = Mapping[Any, Callable[..., Any]]


def compile_with_plan(
    backend: Backend, options: Options, plan: Plan, graph: Graph, make: Callable[[Graph], T]
) -> T:
    """Decomposes the calls that a plan names, in a copy, and compiles it with `make`.

    Args:
        backend: Says what is decomposed in turn.
        options: Of the backend.
        plan: Of the graph, or of one that it is part of.
        graph: With static shapes; not changed.
        make: Compiles the copy, which it may change.

    Raises:
        LoweringError: One call cannot be decomposed or lowered; it names the call of `graph`.
    """
    names = [node.name for node in graph.calls if node.name in plan.decomposed]
    rules: Rules = {}
    if names:
        keep = frozenset(backend.preserved_operators(options))
        rules = nested_decomposition_table(keep, backend.decomposed_operators(options))
    return compile_decomposed(graph, names, rules, make)


def fingerprint_with_plan(graph: Graph, plan: Plan, ranged: bool = False) -> str:
    """Hashes a graph together with which of its calls the plan decomposes."""
    places = [i for i, node in enumerate(graph.calls) if node.name in plan.decomposed]
    mark = fingerprint(graph, ranged)
    return f"{mark} {places}" if places else mark


def compile_decomposed(
    graph: Graph, names: Collection[str], rules: Rules, make: Callable[[Graph], T]
) -> T:
    """Decomposes the named calls in a copy and compiles it; errors name the original call.

    Args:
        graph: With static shapes; not changed.
        names: Of the calls.
        rules: How operators are decomposed in turn that come up inside.
        make: Compiles the copy, which it may change.

    Raises:
        LoweringError: One call cannot be decomposed or lowered; it names the call of `graph`.
    """
    copy = copy_with_decompositions(graph, names, rules)
    origins = {node.name: node.meta[ORIGIN] for node in copy.calls if ORIGIN in node.meta}
    try:
        return make(copy)
    except LoweringError as error:
        if error.node_name not in origins:
            raise
        raise LoweringError(origins[error.node_name], error.op, error.reason) from error


def copy_with_decompositions(graph: Graph, names: Collection[str], rules: Rules) -> Graph:
    """Copies a graph with the named calls decomposed, or raises `LoweringError`.

    Its sizes do not know where they come from if a decomposition is another one for others.
    """
    result = graph.copy()
    for node in result.calls:
        node.meta.pop(ORIGIN, None)  # of a call that this graph does not have any more
    every, traces = all_decomposition_rules(), CallTraceCache()

    def apart(node: fx.Node) -> None:
        target: Any = node.target
        if target not in every:
            raise LoweringError(node.name, str(target), "torch has no decomposition of it")
        decompose_call(node, {**rules, target: every[target]}, traces)

    for node in [n for n in result.calls if n.name in names]:
        if not node._erased:  # with one that had read it
            apart(node)
    if names:
        _keep_promises(result, graph)
        result.module.recompile()
    if has_hardcoded_sizes(result.module.graph):
        drop_size_expressions(result.module.graph)
    return result


def _keep_promises(result: Graph, graph: Graph) -> None:
    """Gives outputs the strides of the calls that were decomposed: torch promises those."""
    for made, promised in zip(result.outputs, graph.outputs, strict=True):
        value = promised.meta["val"] if isinstance(promised, fx.Node) else None
        if not isinstance(value, Tensor):
            continue
        if ORIGIN in made.meta:
            made.meta["val"] = value
            made.meta |= {k: promised.meta[k] for k in (SIZES, STRIDES) if k in promised.meta}
        elif infer_layout(made.meta["val"]) != infer_layout(value):
            reason = (
                "its decomposition returns an input, whose strides differ from the expected ones"
            )
            raise LoweringError(promised.name, str(promised.target), reason)

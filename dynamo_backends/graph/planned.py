"""Compiles copies of graphs in which the calls are decomposed that a plan decomposes."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from torch import Tensor, fx

from dynamo_backends.graph.call_tracing import CallTraces
from dynamo_backends.graph.decompose import ORIGIN, decompose
from dynamo_backends.graph.decompositions import every_rule, inner_decompositions
from dynamo_backends.graph.fingerprint import fingerprint
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import storage_of
from dynamo_backends.graph.numbers import has_forgotten
from dynamo_backends.graph.sizes import SIZES, STRIDES, forget_sizes
from dynamo_backends.interface.backend import Backend
from dynamo_backends.interface.errors import LoweringError
from dynamo_backends.interface.options import Options
from dynamo_backends.interface.plan import Plan

T = TypeVar("T")
Rules = Mapping[Any, Callable[..., Any]]


def compile_planned(
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
        keep = frozenset(backend.keeps(options))
        rules = inner_decompositions(keep, backend.decomposes(options))
    return compile_decomposed(graph, names, rules, make)


def planned_fingerprint(graph: Graph, plan: Plan, ranged: bool = False) -> str:
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
    copy = decomposed(graph, names, rules)
    origins = {node.name: node.meta[ORIGIN] for node in copy.calls if ORIGIN in node.meta}
    try:
        return make(copy)
    except LoweringError as error:
        if error.node_name not in origins:
            raise
        raise LoweringError(origins[error.node_name], error.op, error.reason) from error


def decomposed(graph: Graph, names: Collection[str], rules: Rules) -> Graph:
    """Copies a graph with the named calls decomposed, or raises `LoweringError`.

    Its sizes do not know where they come from if a decomposition is another one for others.
    """
    result = graph.copy()
    for node in result.calls:
        node.meta.pop(ORIGIN, None)  # of a call that this graph does not have any more
    every, traces = every_rule(), CallTraces()

    def apart(node: fx.Node) -> None:
        target: Any = node.target
        if target not in every:
            raise LoweringError(node.name, str(target), "torch has no decomposition of it")
        decompose(node, {**rules, target: every[target]}, traces)

    for node in [n for n in result.calls if n.name in names]:
        if not node._erased:  # with one that had read it
            apart(node)
    if names:
        _keep_promises(result, graph)
        result.module.recompile()
    if has_forgotten(result.module.graph):
        forget_sizes(result.module.graph)
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
        elif storage_of(made.meta["val"]) != storage_of(value):
            reason = (
                "its decomposition returns an input, whose strides differ from the expected ones"
            )
            raise LoweringError(promised.name, str(promised.target), reason)

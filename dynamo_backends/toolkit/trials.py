"""Trials: a call compiled alone, run once, and judged against eager.

For backends whose vendor knows better than a table what it can run, and may mean something else by
it than torch does.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends.graph.graph import Graph, Input, Role
from dynamo_backends.toolkit.quiet import silenced
from dynamo_backends.verify import difference, in_float64, widen

COMPARED_ELEMENTS = 1 << 20
"""Calls with more elements than this, inputs and outputs together, are compiled but not run."""

# The accuracy rule is about a whole tensor, as wide for float64 as for float32, and does not look
# further where the reference has NaN.
_TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 5e-3,
    torch.bfloat16: 5e-2,
}


def alone(node: fx.Node) -> Graph:
    """A graph of one call and its results that are used."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for source in node.all_input_nodes:
        copies[source] = graph.placeholder(source.name)
        copies[source].meta = {"val": source.meta["val"]}
    copy = graph.node_copy(node, copies.__getitem__)
    copy.meta = {"val": node.meta["val"]}
    results = [copy] if isinstance(node.meta["val"], Tensor) else []
    for index in used_results(node):
        item = graph.call_function(operator.getitem, (copy, index))
        item.meta = {"val": node.meta["val"][index]}
        results.append(item)
    graph.output(tuple(results))
    inputs = tuple(Input(n.name, Role.ACTIVATION) for n in copies.values())
    return Graph(fx.GraphModule(torch.nn.Module(), graph), "inference", inputs)


def used_results(node: fx.Node) -> list[int]:
    """Which of several results of a call are used."""
    if isinstance(node.meta["val"], Tensor):
        return []
    users = (u for u in node.users if u.target is operator.getitem)
    return sorted({int(u.args[1]) for u in users})  # type: ignore[arg-type]


def tensors(value: Any) -> list[Tensor]:
    """The tensors in the `meta["val"]` of a node."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [v for v in value if isinstance(v, Tensor)]
    return []


def elements(node: fx.Node) -> int:
    """How many elements a call reads and writes."""
    found = [t for n in (*node.all_input_nodes, node) for t in tensors(n.meta["val"])]
    return sum(t.numel() for t in found)


class EagerRefused(Exception):
    """Eager does not take the inputs of a trial."""


def judge(
    graph: Graph, run: Callable[[list[Any]], Sequence[Any]], args: Sequence[Any]
) -> str | None:
    """What is wrong with a call's results, in words; None if nothing is.

    Args:
        graph: From `alone`.
        run: The compiled call, on the list of its inputs.
        args: Inputs of the trial.

    Raises:
        EagerRefused: Eager does not take these inputs, so they show nothing.
    """
    try:
        expected = graph.module(*args)
        precise = in_float64(graph.module)(*map(widen, args))
    except Exception as error:
        raise EagerRefused(type(error).__name__) from error
    results = run(list(args))
    with silenced("torch._dynamo"):  # which says that a reference has NaN
        wrong = difference(expected, results, precise)
    return _imprecise(graph, expected, results) if wrong is None else wrong


def _imprecise(graph: Graph, expected: Sequence[Tensor], results: Sequence[Tensor]) -> str | None:
    elementwise = torch.Tag.pointwise in getattr(graph.calls[0].target, "tags", ())
    for i, (e, r) in enumerate(zip(expected, results, strict=True)):
        tolerance = _TOLERANCE.get(e.dtype)
        if tolerance is None or not e.numel():
            continue
        finite = e.nan_to_num(0, 0, 0).abs()
        scale = finite + 0.1 if elementwise else finite.max()
        if not (((e - r).abs() <= tolerance * scale) | (e == r) | (e.isnan() & r.isnan())).all():
            return f"output {i} is less precise than eager's"
    return None

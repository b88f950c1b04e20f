"""Which inputs of an inference graph a block may write over.

A graph that updates its inputs returns their new contents (`Input.updated_by`). Where one block
computes all of them and nobody else reads what they were, that block may be given their memory:
then nothing is copied, and all is updated in one run or nothing.
"""

import dataclasses
from collections.abc import Sequence

from torch import fx

from dynamo_backends.graph.aliasing import root
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.partition import Part


def with_donations(graph: Graph, parts: Sequence[Part]) -> tuple[Part, ...]:
    """The parts of a graph; that which may update its inputs in place knows which.

    Args:
        graph: With concrete sizes, after all passes.
        parts: In the order in which they run.
    """
    taken = donations(graph, parts) if graph.kind == "inference" else None
    if taken is None:
        return tuple(parts)
    at, updated = taken
    part = parts[at]
    inputs = tuple(
        dataclasses.replace(x, updated_by=updated.get(name))
        for x, name in zip(part.graph.inputs, part.reads, strict=True)
    )
    donated = dataclasses.replace(part, graph=dataclasses.replace(part.graph, inputs=inputs))
    return (*parts[:at], donated, *parts[at + 1 :])


def donations(graph: Graph, parts: Sequence[Part]) -> tuple[int, dict[str, int]] | None:
    """The part that may update all inputs in place; None: there is none.

    Returns:
        Which it is, and for each updated input the position of its new contents among its results.
    """
    places = graph.placeholders
    new = {places[i].name: graph.outputs[at] for i, at in graph.updates.items()}
    if not new or not all(_fits(places[i], graph.outputs[at]) for i, at in graph.updates.items()):
        return None
    returned = {root(x).name for x in graph.outputs if isinstance(x, fx.Node)}
    readers = [i for i, part in enumerate(parts) if not new.keys().isdisjoint(part.reads)]
    if len(readers) != 1 or not returned.isdisjoint(new):
        return None
    part = parts[readers[0]]
    names = [x.name for x in new.values()]
    computes_all = part.on_backend and set(names) <= set(part.writes)
    if not computes_all or len(set(names)) < len(names):
        return None
    return readers[0], {name: part.writes.index(x.name) for name, x in new.items()}


def _fits(place: fx.Node, contents: object) -> bool:
    """Whether the new contents of an input can lie where the old ones are."""
    if not isinstance(contents, fx.Node) or contents.op != "call_function":
        return False
    old, new = place.meta["val"], contents.meta["val"]
    return bool((old.shape, old.stride(), old.dtype) == (new.shape, new.stride(), new.dtype))

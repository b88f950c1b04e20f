"""Decides which inputs of an inference graph a block may write over, wholly or in rows.

A graph that updates its inputs returns their new contents (`Input.updated_by`). Where one block
computes all of them and nobody else reads what they were, that block may be given their memory:
then nothing is copied, and all is updated in one run or nothing.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends.graph.aliasing import find_view_base
from dynamo_backends.graph.graph import Graph, eliminate_dead_calls
from dynamo_backends.graph.partition import GraphPart

aten = torch.ops.aten


def mark_donated_inputs(graph: Graph, parts: Sequence[GraphPart]) -> tuple[GraphPart, ...]:
    """Returns the parts; the one that may overwrite its inputs gets `Input.updated_by`.

    Args:
        graph: With concrete sizes, after all passes.
        parts: In the order in which they run.
    """
    taken = find_donations(graph, parts) if graph.kind == "inference" else None
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


def find_donations(graph: Graph, parts: Sequence[GraphPart]) -> tuple[int, dict[str, int]] | None:
    """Finds the part that may update all mutated inputs in place; None if there is none.

    Returns:
        Which it is, and for each updated input the position of its new contents among its results.
    """
    places = graph.placeholders
    new = {places[i].name: graph.outputs[at] for i, at in graph.updates.items()}
    if not new or not all(_fits(places[i], graph.outputs[at]) for i, at in graph.updates.items()):
        return None
    returned = {find_view_base(x).name for x in graph.outputs if isinstance(x, fx.Node)}
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
    """Returns whether the new contents of an input can lie where the old ones are."""
    if not isinstance(contents, fx.Node) or contents.op != "call_function":
        return False
    old, new = place.meta["val"], contents.meta["val"]
    return bool((old.shape, old.stride(), old.dtype) == (new.shape, new.stride(), new.dtype))


@dataclass(frozen=True)
class RowWrite:
    """A write of rows to an input, as to a KV cache, that torch does after the program ran.

    Attributes:
        place: Position of the input.
        dim: The dimension of the input that the index is of.
        rows: Position of the output that has the rows, in the place of all new contents.
        index: Position of the output that says which rows they are.
    """

    place: int
    dim: int
    rows: int
    index: int

    def make_writer(self, target: Tensor, results: Sequence[Tensor]) -> Callable[[], Any]:
        """Returns a callable that writes one call's rows to the input with `index_put_`.

        Args:
            target: The input.
            results: Results of the graph.
        """
        rows = results[self.rows].movedim(self.dim, 0)
        return partial(Tensor.index_put_, target.movedim(self.dim, 0), (results[self.index],), rows)


def without_input_updates(graph: Graph) -> Graph:
    """Copies a graph and clears `updated_by`: no result overwrites an input."""
    return replace(graph.copy(), inputs=tuple(replace(x, updated_by=None) for x in graph.inputs))


def extract_row_writes(graph: Graph) -> tuple[Graph, tuple[RowWrite, ...]]:
    """Copies a graph so that it returns rows to write instead of whole updated inputs.

    Args:
        graph: In normal form, of the kind "inference"; not changed.

    Returns:
        A graph with the same inputs, none of which is updated by a result. Results that are indices
        follow the others.
    """
    found = {i: at for i, at in graph.updates.items() if _writes_rows(graph, i, graph.outputs[at])}
    result = without_input_updates(graph)
    if not found:
        return result, ()
    outputs = list(result.outputs)
    writes = []
    for place, at in found.items():
        _, indices, rows, *_ = outputs[at].args
        (dim,) = (d for d, index in enumerate(indices) if index is not None)
        writes.append(RowWrite(place, dim, at, len(outputs)))
        outputs[at] = rows
        outputs.append(indices[dim])
    result.module.graph.output_node().args = (tuple(outputs),)
    eliminate_dead_calls(result.module.graph)
    result.module.recompile()
    kept = tuple(
        replace(x, updated_by=None) if i in found else x for i, x in enumerate(graph.inputs)
    )
    return replace(result, inputs=kept), tuple(writes)


def _writes_rows(graph: Graph, place: int, contents: Any) -> bool:
    if not isinstance(contents, fx.Node) or contents.target is not aten.index_put.default:
        return False
    target, indices, rows, *accumulate = contents.args
    used = [x.meta["val"] for x in indices if x is not None]  # type: ignore[union-attr]
    return (
        target is graph.placeholders[place]
        and not any(accumulate)
        and not contents.kwargs
        and isinstance(rows, fx.Node)
        and rows.meta["val"].ndim == contents.meta["val"].ndim
        and [x.ndim for x in used] == [1]
        and used[0].dtype in (torch.int64, torch.int32)
    )

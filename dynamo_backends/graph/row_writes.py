"""Inputs of which a graph writes a few rows: those leave the graph, and not all of the input.

`cache.index_copy_(2, position, keys)` becomes, in a functional graph, a cache with other rows,
which would be copied to the input. The graph returns the rows and their indices instead, and torch
writes them to the input when the graph has run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends.graph.graph import Graph, drop_dead

aten = torch.ops.aten


@dataclass(frozen=True)
class RowWrite:
    """Rows that are written to an input.

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

    def action(self, target: Tensor, results: Sequence[Tensor]) -> Callable[[], Any]:
        """What writes the rows of one call, in C.

        Args:
            target: The input.
            results: Of the graph.
        """
        rows = results[self.rows].movedim(self.dim, 0)
        return partial(Tensor.index_put_, target.movedim(self.dim, 0), (results[self.index],), rows)


def without_updates(graph: Graph) -> Graph:
    """A copy of a graph whose results are new, none the contents of an input."""
    return replace(graph.copy(), inputs=tuple(replace(x, updated_by=None) for x in graph.inputs))


def separate_row_writes(graph: Graph) -> tuple[Graph, tuple[RowWrite, ...]]:
    """A graph that returns rows, and what is to be done with them.

    Args:
        graph: In normal form, of the kind "inference"; not changed.

    Returns:
        A graph with the same inputs, none of which is updated by a result. Results that are indices
        follow the others.
    """
    found = {i: at for i, at in graph.updates.items() if _writes_rows(graph, i, graph.outputs[at])}
    result = without_updates(graph)
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
    drop_dead(result.module.graph)
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

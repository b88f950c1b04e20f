"""Writes to inputs of inference graphs: all of a call's, or none.

A functional graph returns what its inputs become. AOT Autograd would copy these results to the
inputs one after the other, where a signal may come in between. Here all are copied in one call of
C code, and the inputs themselves take the place of the results, which AOT Autograd then leaves as
they are. What the backend wrote in place (see `graph.donation`) is the input itself already.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends.graph.donation import RowWrite
from dynamo_backends.runtime.atomic_copies import copy_atomically

Run = Callable[[list[Any]], Sequence[Any]]


def wrap_with_input_writes(run: Run, graph: fx.Graph) -> Run:
    """Wraps a compiled graph so that it writes updated values into its inputs.

    Args:
        run: The compiled graph: list in, sequence out.
        graph: The graph.
    """
    updates = private.annotated_input_mutations(graph)
    return _writing(run, updates, ()) if updates else run


def wrap_with_row_writes(run: Run, updates: Mapping[int, int], rows: Sequence[RowWrite]) -> Run:
    """Wraps a compiled graph so that it writes rows, and other updates, into its inputs.

    Args:
        run: The compiled graph. The last of its results are indices.
        updates: Positions of all inputs that are updated, and of the results in their places.
        rows: Those of which rows are written.
    """
    return _writing(run, updates, rows) if rows else run


def _writing(run: Run, updates: Mapping[int, int], rows: Sequence[RowWrite]) -> Run:
    by_rows = {x.place for x in rows}
    whole = [(i, at) for i, at in updates.items() if i not in by_rows]
    always = [at for x in rows for at in (x.rows, x.index)]
    end = -len(rows) if rows else None

    def call(args: list[Any]) -> Sequence[Any]:
        inputs = {i: args[i] for i in updates}
        results = list(run(args))
        changed = [(i, at) for i, at in whole if results[at] is not inputs[i]]
        if changed or rows:
            _set_apart(results, [*always, *(at for _, at in changed)], inputs.values())
            puts = [x.make_writer(inputs[x.place], results) for x in rows]
            targets = [inputs[i] for i, _ in changed]
            copy_atomically(targets, [results[at] for _, at in changed], [], None, puts)
        for i, at in updates.items():
            results[at] = inputs[i]
        return results[:end]

    return call


def _set_apart(results: list[Any], read: Sequence[int], inputs: Iterable[Tensor]) -> None:
    """Copies results that are to be written and lie in the memory of an input that is, too."""
    written = {x.untyped_storage().data_ptr() for x in inputs}
    for at in read:
        if results[at].untyped_storage().data_ptr() in written:
            results[at] = results[at].clone()

"""The batch of a step on a mesh of several processes: each gives a part of it.

The function gets placeholders that stand for the whole batch, as on one device.
"""

import gc
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dynamo_backends.aot.step.mesh.across import whole_batch
from dynamo_backends.aot.step.mesh.parallel import Parallel
from dynamo_backends.aot.step.record.segment import Segment
from dynamo_backends.aot.step.record.templates import refs
from dynamo_backends.aot.step.record.trie import Entry, Trie
from dynamo_backends.aot.step.state.arguments import flatten_batch, unflatten_batch
from dynamo_backends.interface.protocols import MeshTarget
from dynamo_backends.runtime.device_tensor import DeviceTensor


def move_written(
    segment: Segment, path: Sequence[Entry], parallel: Parallel, target: MeshTarget
) -> None:
    """Moves tensors that calls may write to, and that are no arguments, to the mesh.

    Args:
        segment: A call that went the way of the record.
        path: The calls.
        parallel: How the step is spread.
        target: The mesh.
    """
    trie = segment.trie
    taken = {n for e in path if e.mutates for n in (*refs(e.args), *refs(e.kwargs))}
    taken |= {trie.aliases.get(n, n) for n in taken}
    arguments = {id(x) for x in flatten_batch(segment.arguments)[0]}
    found = [
        n
        for n in sorted(taken)
        if trie.kinds[n] == "input"
        and not isinstance(trie.values[n], DeviceTensor)
        and id(trie.values[n]) not in arguments
    ]
    if found:
        gc.collect()  # a trace refers to tensors, which cannot be moved then
    for number in found:
        target.place(trie.values[number], parallel.mesh.replicated)
        trie.note_move(number)


class WholeBatch:
    """The arguments of a call, of which this process has a part.

    Attributes:
        kind: Tells batches of other shapes.
    """

    def __init__(self, parallel: Parallel, arguments: Any):
        self._parallel = parallel
        self._batch, self._spec = flatten_batch(arguments)
        self._tensors = [x for x in self._batch if isinstance(x, Tensor)]
        kinds = tuple((x.shape, x.dtype, x.requires_grad) for x in self._tensors)
        self.kind = self._spec, kinds

    def begin(self, trie: Trie) -> None:
        """Lets a new trie begin with the batch.

        Raises:
            StepCaptureError: One of its tensors requires a gradient.
            OptionError: One has too few dimensions.
        """
        trie.add_batch(whole_batch(self._parallel, self._tensors))

    def parts(self, trie: Trie) -> dict[int, Tensor]:
        """Returns this process's parts, by the numbers of the batch."""
        return dict(zip(trie.batch, self._tensors, strict=True))

    def arguments(self, trie: Trie) -> Any:
        """Returns the arguments for the function: placeholders for tensors."""
        placeholders = map(trie.value, trie.batch)
        leaves = [next(placeholders) if isinstance(x, Tensor) else x for x in self._batch]
        return unflatten_batch(leaves, self._spec)

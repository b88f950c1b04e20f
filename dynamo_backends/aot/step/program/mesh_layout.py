"""Decides where the inputs and outputs of a captured step are on a mesh."""

import gc
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from dynamo_backends.aot.step.mesh.multiprocess import fake_global_batch
from dynamo_backends.aot.step.mesh.parallel import Parallel
from dynamo_backends.aot.step.program.recording import Definition, Recording
from dynamo_backends.aot.step.record.segment import Segment
from dynamo_backends.aot.step.record.templates import refs
from dynamo_backends.aot.step.record.trie import Entry, Trie
from dynamo_backends.aot.step.state.arguments import flatten_batch, unflatten_batch
from dynamo_backends.aot.step.state.inventory import Inventory
from dynamo_backends.graph.graph import Graph, Role
from dynamo_backends.interface.mesh import Mesh, MeshLayout, Placement
from dynamo_backends.interface.protocols import MeshTarget
from dynamo_backends.runtime.device_tensor import DeviceTensor


def layout_of(
    parallel: Parallel,
    graph: Graph,
    definition: Definition,
    inventory: Inventory,
    recording: Recording,
    batch: Sequence[Tensor],
    replicated: Collection[int] = (),
) -> MeshLayout:
    """Returns the layout of a step's graph.

    Args:
        parallel: What the user asked for.
        graph: Graph of the step; its inputs are as `Variant` gives them.
        definition: What was captured.
        inventory: What lives on.
        recording: Recording of the step.
        batch: The tensors that it is given.
        replicated: Positions of those that every device has whole.

    Raises:
        OptionError: A tensor of the batch cannot be split.
    """
    slots = parallel.of_slots(inventory, definition.models, definition.optimizers)
    batches = {
        i: parallel.mesh.replicated if i in replicated else parallel.of_batch(x)
        for i, x in enumerate(batch)
    }
    known = [parallel.mesh.replicated, *slots]
    known += [slots[i] for i in recording.gradient_slots]
    known += batches.values()
    known += [batches[i] for i in recording.batch_with_gradient]
    values = [p.meta["val"] for p in graph.placeholders]
    tensors = [x for i, x in enumerate(batch) if i not in replicated]
    like_batch = LikeBatch(parallel.mesh, parallel.batch, tensors)
    inputs = list(known)
    for value, each in zip(values[len(known) :], graph.inputs[len(known) :], strict=True):
        is_drawn = each.role is Role.ACTIVATION
        inputs.append(like_batch(value) if is_drawn else parallel.mesh.replicated)
    updated = [inputs[i] for i in graph.updates]
    others = {output: slots[i] for output, i in recording.gradients}
    others |= {output: batches[i] for output, i in recording.batch_gradients}
    if parallel.mesh.of_ranks:  # whole on all ranks: whoever reads one waits for nobody
        rest = range(len(updated), len(graph.outputs))
        others = dict.fromkeys(range(len(rest)), parallel.mesh.replicated) | others
    values = [node.meta["val"] for node in graph.outputs[len(updated) :]]
    outputs = updated + [others.get(k) or like_batch(value) for k, value in enumerate(values)]
    parameters = {
        1 + i: slot.name for i, slot in enumerate(inventory.slots) if slot.role is Role.PARAMETER
    }
    return MeshLayout(tuple(inputs), tuple(outputs), parameters)


class LikeBatch:
    """Guesses the placement of tensors whose first dimension is the batch dimension.

    Results do not depend on it: it says where elements are kept.
    """

    def __init__(self, mesh: Mesh, placement: Placement, batch: Sequence[Tensor]):
        self._mesh = mesh
        self._placement = tuple(0 if d == 0 else None for d in placement)
        self._size = next((x.shape[0] for x in batch if x.dim()), 0)
        self._parts = self._mesh.shard_count(self._placement, 0)

    def __call__(self, value: Tensor) -> Placement:
        """Returns the placement of a value like this one."""
        if not value.dim() or not self._size or value.shape[0] % self._size:
            return self._mesh.replicated
        return self._placement if value.shape[0] % self._parts == 0 else self._mesh.replicated


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


class GlobalBatch:
    """Holds a call's arguments, of whose global batch this process has a part."""

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
        trie.add_batch(fake_global_batch(self._parallel, self._tensors))

    def parts(self, trie: Trie) -> dict[int, Tensor]:
        """Returns this process's parts, by the numbers of the batch."""
        return dict(zip(trie.batch, self._tensors, strict=True))

    def arguments(self, trie: Trie) -> Any:
        """Returns the arguments for the function: placeholders for tensors."""
        placeholders = map(trie.value, trie.batch)
        leaves = [next(placeholders) if isinstance(x, Tensor) else x for x in self._batch]
        return unflatten_batch(leaves, self._spec)

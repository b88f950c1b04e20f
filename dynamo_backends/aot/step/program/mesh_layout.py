"""Where the inputs and outputs of a captured step are on a mesh."""

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, fx

from dynamo_backends.aot.step.mesh.parallel import Parallel
from dynamo_backends.aot.step.program.recording import Definition, Recording
from dynamo_backends.aot.step.state.inventory import Inventory
from dynamo_backends.graph.graph import Graph, Role
from dynamo_backends.interface.mesh import Mesh, MeshLayout, Placement


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
        graph: Of the step; its inputs are as `Variant` gives them.
        definition: What was captured.
        inventory: What lives on.
        recording: Of the step.
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
    outputs = updated + _others(graph.outputs[len(updated) :], others, like_batch)
    parameters = {
        1 + i: slot.name for i, slot in enumerate(inventory.slots) if slot.role is Role.PARAMETER
    }
    return MeshLayout(tuple(inputs), tuple(outputs), parameters)


def _others(
    outputs: Sequence[fx.Node], known: Mapping[int, Placement], like_batch: "LikeBatch"
) -> list[Placement]:
    return [known.get(k) or like_batch(node.meta["val"]) for k, node in enumerate(outputs)]


class LikeBatch:
    """The placement of what has the batch in its first dimension, as far as can be seen.

    Results do not depend on it: it says where elements are kept.
    """

    def __init__(self, mesh: Mesh, placement: Placement, batch: Sequence[Tensor]):
        self._mesh = mesh
        self._placement = tuple(0 if d == 0 else None for d in placement)
        self._size = next((x.shape[0] for x in batch if x.dim()), 0)
        self._parts = self._mesh.parts(self._placement, 0)

    def __call__(self, value: Tensor) -> Placement:
        """Returns the placement of a value like this one."""
        if not value.dim() or not self._size or value.shape[0] % self._size:
            return self._mesh.replicated
        return self._placement if value.shape[0] % self._parts == 0 else self._mesh.replicated

"""A step of several processes: each gives a part of the batch, and all begin alike."""

import hashlib
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.aot.step.mesh.parallel import Parallel
from dynamo_backends.aot.step.state.inventory import Inventory
from dynamo_backends.interface.errors import RankError, StepCaptureError
from dynamo_backends.runtime.device_tensor import DeviceTensor
from dynamo_backends.runtime.ranks import RankGroup, default_rank_group
from dynamo_backends.runtime.weight_binding import value_bits

_ADVICE = "Build the same model and optimizer on all ranks, and pass the same arguments."


def ranks_of(parallel: Parallel | None) -> RankGroup | None:
    """The processes that have a device of a mesh each; None: there is no mesh, or one process."""
    return default_rank_group() if parallel is not None and parallel.mesh.of_ranks else None


def broadcast_initial_state(
    ranks: RankGroup, parallel: Parallel, inventory: Inventory, home: str
) -> None:
    """Broadcasts rank 0's tensors that are not yet on the mesh to all ranks.

    Raises:
        RankError: The ranks have different models, optimizers or arguments.
    """
    pairs = list(zip(inventory.slots, inventory.tensors, strict=True))
    facts = [f"has mesh=({parallel.mesh}), parallel={parallel.kind!r}"]
    facts += [f"has placements of {k!r}: {v}" for k, v in parallel.placements.items()]
    facts.append(f"has batch_placements {parallel.batch}")
    facts += [f"has {slot.name} of {x.dtype}{list(x.shape)}" for slot, x in pairs]
    new = [
        (slot.name, x)
        for slot, x in pairs
        if not slot.is_setting and not (isinstance(x, DeviceTensor) and x.home == home)
    ]
    facts += [f"brings {name} to the mesh" for name, _ in new]
    key = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    ranks.require_agreement("begins a step", key, facts, _ADVICE)
    contents = [x.host() if isinstance(x, DeviceTensor) else x for _, x in new]
    if contents:
        ranks.broadcast("gets parameters of rank 0", [x for x in contents if x.numel()])


def fake_global_batch(parallel: Parallel, batch: Sequence[Any]) -> list[Any]:
    """Returns the batch with tensors of the global batch's shape, without contents.

    Raises:
        StepCaptureError: One of its tensors requires a gradient.
        OptionError: One has too few dimensions.
    """
    return [_whole(parallel, x) if isinstance(x, Tensor) else x for x in batch]


def _whole(parallel: Parallel, tensor: Tensor) -> Tensor:
    if tensor.requires_grad or tensor.grad is not None:
        raise StepCaptureError(
            "a tensor of the batch requires a gradient, which is not supported on a mesh with "
            "several processes. Make it a parameter, or pass it detached."
        )
    shape = parallel.mesh.global_shape(parallel.of_part(tensor), tensor.shape)
    return torch.empty(shape, dtype=tensor.dtype)


def gathered_batch(
    ranks: RankGroup, parallel: Parallel, batch: Sequence[Any], replicated: Collection[int] = ()
) -> list[Any]:
    """Gathers the batches of all processes (all-gather); every rank gets the whole."""
    return [
        _gathered(ranks, parallel, x) if isinstance(x, Tensor) and i not in replicated else x
        for i, x in enumerate(batch)
    ]


def _gathered(ranks: RankGroup, parallel: Parallel, tensor: Tensor) -> Tensor:
    plain = tensor.host() if isinstance(tensor, DeviceTensor) else tensor
    mesh, placement = parallel.mesh, parallel.of_part(tensor)
    parts = ranks.all_gather("compares a step with eager", plain)
    grid = torch.tensor(mesh.devices).reshape(mesh.sizes)
    whole = plain.new_empty(mesh.global_shape(placement, tensor.shape))
    given: dict[tuple[tuple[int, int], ...], int] = {}
    for place in torch.cartesian_prod(*map(torch.arange, mesh.sizes)).reshape(-1, grid.dim()):
        rank = int(grid[tuple(place)])
        index = _part(mesh.sizes, placement, place.tolist(), tensor.shape)
        first = given.setdefault(tuple((s.start, s.stop) for s in index), rank)
        if not torch.equal(value_bits(parts[first]), value_bits(parts[rank])):
            raise RankError(
                f"rank {first} and rank {rank} have different values in a batch tensor that the "
                f"mesh ({mesh}) does not split between them. Pass the same data on these ranks.",
                rank,
            )
        whole[index] = parts[rank]
    return whole


def _part(
    sizes: Sequence[int], placement: Sequence[int | None], place: Sequence[int], part: Sequence[int]
) -> tuple[slice, ...]:
    """Returns which part of a tensor the device at a place of the mesh has."""
    numbers = [0] * len(part)
    for size, dim, position in zip(sizes, placement, place, strict=True):
        if dim is not None:
            numbers[dim] = numbers[dim] * size + position
    return tuple(slice(n * k, (n + 1) * k) for n, k in zip(numbers, part, strict=True))

"""Decides where parameters, state and batches of a step are on a mesh."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from dynamo_backends.aot.step.state.inventory import Inventory
from dynamo_backends.graph.graph import Role
from dynamo_backends.interface.errors import OptionError, StepCaptureError, did_you_mean
from dynamo_backends.interface.mesh import Mesh, Placement
from dynamo_backends.interface.protocols import MeshTarget
from dynamo_backends.runtime.ranks import is_multiprocess

KINDS = ("ddp", "fsdp")


def mesh_of(given: Any) -> Mesh:
    """Returns a torch `DeviceMesh`, or a dict from names to sizes, as a mesh.

    With several processes of torch.distributed each has one of its devices.

    Raises:
        OptionError: It is neither, or has not one device for each process.
    """
    made = _named(given) if isinstance(given, Mapping) else _of_torch(given)
    if not is_multiprocess():
        _refuse_lonely(made)
        return made
    size = torch.distributed.get_world_size()
    if sorted(made.devices) != list(range(size)):
        raise OptionError(
            f"mesh ({made}) has {made.size} devices, but torch.distributed has {size} processes, "
            f"and each process provides one device. Choose sizes whose product is {size}, such as "
            f"{{'data': {size}}}."
        )
    return replace(made, of_ranks=True)


def _refuse_lonely(mesh: Mesh) -> None:
    """Processes of torchrun that do not know each other would train apart."""
    distributed = torch.distributed
    if not distributed.is_available() or distributed.is_initialized():
        return
    size = os.environ.get("WORLD_SIZE", "1")
    if distributed.is_torchelastic_launched() and size != "1":
        raise OptionError(
            f"mesh ({mesh}) is used in one of {size} torchrun processes before the process group "
            "exists. Call torch.distributed.init_process_group('gloo') before compile_step."
        )


def _of_torch(given: Any) -> Mesh:
    ranks = getattr(given, "mesh", None)
    if not isinstance(ranks, torch.Tensor):
        raise OptionError(
            "mesh must be a torch DeviceMesh or a dict from names of dimensions to sizes, such as "
            f"{{'data': 4, 'model': 2}}, not {given!r}"
        )
    names = given.mesh_dim_names or tuple(f"dim_{i}" for i in range(ranks.ndim))
    devices = tuple(ranks.flatten().tolist())
    return Mesh(tuple(names), tuple(ranks.shape), devices, given.device_type)


def _named(given: Mapping[Any, Any]) -> Mesh:
    for name, size in given.items():
        is_size = isinstance(size, int) and not isinstance(size, bool) and size > 0
        if not isinstance(name, str) or not name or not is_size:
            raise OptionError(
                "mesh must be a dict from names of dimensions to positive sizes, such as "
                f"{{'data': 4, 'model': 2}}; it has {name!r}: {size!r}"
            )
    if not given:
        raise OptionError("mesh must have at least one dimension, such as {'data': 8}, not {}")
    mesh = Mesh(tuple(given), tuple(given.values()), ())
    return Mesh(mesh.names, mesh.sizes, tuple(range(mesh.size)))


def placement_of(given: Any, mesh: Mesh, what: str) -> Placement:
    """torch's placements, one per dimension of the mesh, in plain numbers.

    Raises:
        OptionError: There are too few or too many, or one is of another kind.
    """
    if not isinstance(given, Sequence) or len(given) != len(mesh.sizes):
        example = ", ".join(["Shard(0)", *["Replicate()"] * (len(mesh.sizes) - 1)])
        raise OptionError(
            f"{what} must be one placement for each dimension of the mesh ({mesh}), such as "
            f"[{example}], not {given!r}"
        )
    return tuple(_dimension(each, what) for each in given)


def _dimension(given: Any, what: str) -> int | None:
    from torch.distributed.tensor import Partial, Replicate, Shard

    if type(given) is Shard:
        return given.dim
    if type(given) is Replicate:
        return None
    if isinstance(given, Partial):
        raise OptionError(
            f"{what} has {given!r}, but Partial placements are not supported for inputs of a step. "
            "Reduce the tensor first, and use Shard or Replicate."
        )
    raise OptionError(
        f"{what} has {given!r}; placements are Shard(dim) and Replicate() of "
        "torch.distributed.tensor"
    )


def normalize_placement(
    placement: Placement, shape: Sequence[int], mesh: Mesh, what: str, advice: str
) -> Placement:
    """Normalizes negative dimensions of a placement; checks that it splits evenly.

    Args:
        placement: As given.
        shape: Shape of the tensor.
        mesh: The mesh.
        what: The tensor, for errors.
        advice: What to do if it cannot be split evenly.

    Raises:
        OptionError: The tensor lacks a dimension, or one cannot be split evenly.
    """
    dims = len(shape)
    for dim in placement:
        if dim is not None and not -dims <= dim < dims:
            raise OptionError(f"{what} has {dims} dimensions, so Shard({dim}) is out of range")
    fits = tuple(None if dim is None else dim % dims for dim in placement)
    for dim, size in enumerate(shape):
        parts = mesh.shard_count(fits, dim)
        if size % parts:
            raise OptionError(
                f"{what} of shape {list(shape)} cannot be split over the mesh ({mesh}): "
                f"{mesh.describe(fits)} needs a dimension {dim} that {parts} divides, not {size}. "
                + advice
            )
    return fits


@dataclass(frozen=True)
class Parallel:
    """The way in which a step is spread over a mesh.

    Attributes:
        mesh: The mesh.
        kind: "ddp": each device has all parameters that `placements` does not name; "fsdp": each
            has its part of them.
        placements: Placements of parameters, by patterns of their names, the first that matches.
        batch: The placements of the tensors of a batch.
    """

    mesh: Mesh
    kind: str
    placements: Mapping[str, Placement]
    batch: Placement

    def of_slots(
        self,
        inventory: Inventory,
        models: Sequence[nn.Module],
        optimizers: Sequence[Any],
    ) -> list[Placement]:
        """Returns one placement per slot: state is where its parameter is, the rest is everywhere.

        Raises:
            OptionError: A placement does not fit its parameter.
        """
        names = _names(models)
        of_tensor: dict[int, Placement] = {}
        for slot, tensor in zip(inventory.slots, inventory.tensors, strict=True):
            if slot.role is Role.PARAMETER:
                known = names.get(id(tensor), [slot.name])
                of_tensor[id(tensor)] = self._of_parameter(known, tensor)
        for parameter, state in _states(optimizers):
            placed = of_tensor.get(id(parameter), self.mesh.replicated)
            if state.shape == parameter.shape:
                of_tensor[id(state)] = placed
        return [of_tensor.get(id(t), self.mesh.replicated) for t in inventory.tensors]

    def _of_parameter(self, names: Sequence[str], parameter: Tensor) -> Placement:
        for pattern, placement in self.placements.items():
            if any(fnmatchcase(name, pattern) for name in names):
                what = f"the parameter {names[0]}"
                advice = f"Give {pattern!r} another placement."
                return normalize_placement(placement, parameter.shape, self.mesh, what, advice)
        return self._split(parameter) if self.kind == "fsdp" else self.mesh.replicated

    def _split(self, parameter: Tensor) -> Placement:
        """Split over all devices with parts of the batch: the first dimension if that divides."""
        over = [dim is not None for dim in self.batch]
        sizes = list(parameter.shape)
        for dim in sorted(range(len(sizes)), key=lambda d: (d > 0, -sizes[d])):
            placed = tuple(dim if split else None for split in over)
            if sizes[dim] % self.mesh.shard_count(placed, dim) == 0 and sizes[dim]:
                return placed
        return self.mesh.replicated

    def of_batch(self, tensor: Tensor) -> Placement:
        """Returns the placement of a tensor of the batch; one without dimensions is replicated.

        Raises:
            OptionError: It cannot be split.
        """
        if not tensor.dim():
            return self.mesh.replicated
        advice = (
            "Use a batch size that is divisible (DataLoader(drop_last=True)), or register tensors "
            "that are not part of the batch as buffers of the model."
        )
        return normalize_placement(
            self.batch, tensor.shape, self.mesh, "a tensor of the batch", advice
        )

    def of_part(self, tensor: Tensor) -> Placement:
        """Returns the placement of a tensor of which each process passes a part.

        Raises:
            OptionError: It lacks a dimension that is split.
        """
        if not tensor.dim():
            return self.mesh.replicated
        whole = self.mesh.global_shape(self.batch, tensor.shape)
        return normalize_placement(self.batch, whole, self.mesh, "a tensor of the batch", "")

    def check_batch(self, batch: Sequence[Any]) -> None:
        """Raises if a tensor of a batch cannot be split (see `of_batch`)."""
        for each in batch:
            if isinstance(each, Tensor):
                self.of_batch(each)

    def settle(
        self,
        inventory: Inventory,
        models: Sequence[nn.Module],
        optimizers: Sequence[Any],
        target: MeshTarget,
    ) -> None:
        """Moves all that lives from step to step to the mesh.

        Raises:
            OptionError: A placement does not fit its parameter.
            StepCaptureError: Tensors share memory.
        """
        placements = self.of_slots(inventory, models, optimizers)
        _refuse_shared(inventory)
        for i, placement in enumerate(placements):
            if not inventory.slots[i].is_setting:
                target.place(inventory.tensors[i], placement)


def parallel_of(
    mesh: Any,
    parallel: Any,
    placements: Mapping[str, Any] | None,
    batch_placements: Any,
    models: Sequence[nn.Module],
) -> Parallel | None:
    """Returns what the arguments of `compile_step` say; None without a mesh.

    Raises:
        OptionError: One is not valid, or placements name no parameter.
    """
    if mesh is None:
        given = {"parallel": parallel, "placements": placements}
        given["batch_placements"] = batch_placements
        for name, value in given.items():
            if value is not None:
                raise OptionError(f"{name} needs a mesh; pass for example mesh={{'data': 8}}")
        return None
    made = mesh_of(mesh)
    kind = "ddp" if parallel is None else parallel
    if kind not in KINDS:
        raise OptionError(f"parallel must be 'ddp' or 'fsdp', not {parallel!r}")
    placed = {
        pattern: placement_of(given, made, f"placements[{pattern!r}]")
        for pattern, given in (placements or {}).items()
    }
    _check_names(placed, models)
    if batch_placements is None:
        batch = default_batch(made, placed)
    else:
        batch = placement_of(batch_placements, made, "batch_placements")
    return Parallel(made, kind, placed, batch)


def default_batch(mesh: Mesh, placements: Mapping[str, Placement]) -> Placement:
    """Returns the placement that splits the batch over mesh dims without parameter shards."""
    columns = zip(*placements.values(), strict=True) if placements else ((),) * len(mesh.sizes)
    return tuple(None if any(d is not None for d in column) else 0 for column in columns)


def _check_names(placements: Mapping[str, Placement], models: Sequence[nn.Module]) -> None:
    known = [name for names in _names(models).values() for name in names]
    for pattern in placements:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise OptionError(
                f"placements names {pattern!r}, which matches no "
                f"parameter.{did_you_mean(pattern, known)} Use names from "
                "model.named_parameters(); '*' matches any text."
            )


def _names(models: Sequence[nn.Module]) -> dict[int, list[str]]:
    """Returns all names of each parameter; behind the number of its model if there are several."""
    found: dict[int, list[str]] = {}
    for number, model in enumerate(models):
        prefix = "" if len(models) == 1 else f"{number}."
        for name, parameter in model.named_parameters(remove_duplicate=False):
            found.setdefault(id(parameter), []).append(prefix + name)
    return found


def _states(optimizers: Sequence[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for value in state.values():
                if isinstance(parameter, Tensor) and isinstance(value, Tensor):
                    yield parameter, value


def _refuse_shared(inventory: Inventory) -> None:
    owners: dict[int, str] = {}
    for slot, tensor in zip(inventory.slots, inventory.tensors, strict=True):
        if slot.is_setting or not tensor.numel() or type(tensor) not in (Tensor, nn.Parameter):
            continue
        other = owners.setdefault(tensor.untyped_storage().data_ptr(), slot.name)
        if other != slot.name:
            raise StepCaptureError(
                f"{other} and {slot.name} share storage, which is not supported on a mesh. Tie "
                "parameters by using one nn.Parameter in both places, or clone one of them."
            )

"""What users say of a mesh, checked and in plain numbers."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dynamo_backends.interface.errors import OptionError
from dynamo_backends.interface.mesh import Mesh, Placement
from dynamo_backends.runtime.ranks import is_shared

KINDS = ("ddp", "fsdp")


def mesh_of(given: Any) -> Mesh:
    """Returns a torch `DeviceMesh`, or a dict from names to sizes, as a mesh.

    With several processes of torch.distributed each has one of its devices.

    Raises:
        OptionError: It is neither, or has not one device for each process.
    """
    made = _named(given) if isinstance(given, Mapping) else _of_torch(given)
    if not is_shared():
        _refuse_lonely(made)
        return made
    size = torch.distributed.get_world_size()
    if sorted(made.devices) != list(range(size)):
        raise OptionError(
            f"mesh ({made}) has {made.size} devices, but torch.distributed has {size} processes, "
            f"and a mesh has one device of each: its sizes have to multiply to {size}, such as "
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
            f"mesh ({mesh}) is asked for in one of {size} processes of torchrun, which do not know "
            "each other yet. Call torch.distributed.init_process_group('gloo') before compile_step."
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

    Args:
        given: Of `torch.distributed.tensor`: `Shard` and `Replicate`.
        mesh: The mesh.
        what: What is placed, for errors.

    Raises:
        OptionError: There are too few or too many, or one is of another kind.
    """
    if not isinstance(given, Sequence) or len(given) != len(mesh.sizes):
        raise OptionError(
            f"{what} must be one placement for each dimension of the mesh ({mesh}), such as "
            f"{_example(mesh)}, not {given!r}"
        )
    return tuple(_dimension(each, what) for each in given)


def _example(mesh: Mesh) -> str:
    return f"[{', '.join(['Shard(0)', *['Replicate()'] * (len(mesh.sizes) - 1)])}]"


def _dimension(given: Any, what: str) -> int | None:
    from torch.distributed.tensor import Partial, Replicate, Shard

    if type(given) is Shard:
        return given.dim
    if type(given) is Replicate:
        return None
    if isinstance(given, Partial):
        raise OptionError(
            f"{what} has {given!r}: what a step is given must be whole. Add up the parts first, "
            "and use Shard or Replicate."
        )
    raise OptionError(
        f"{what} has {given!r}; placements are Shard(dim) and Replicate() of "
        "torch.distributed.tensor"
    )


def fitted(
    placement: Placement, shape: Sequence[int], mesh: Mesh, what: str, advice: str
) -> Placement:
    """Returns a placement with its dimensions counted from the front.

    Args:
        placement: As given.
        shape: Of the tensor.
        mesh: The mesh.
        what: The tensor, for errors.
        advice: What to do if it cannot be split evenly.

    Raises:
        OptionError: The tensor lacks a dimension, or one cannot be split evenly.
    """
    dims = len(shape)
    for dim in placement:
        if dim is not None and not -dims <= dim < dims:
            raise OptionError(f"{what} has {dims} dimensions, so there is no Shard({dim}) of it")
    fits = tuple(None if dim is None else dim % dims for dim in placement)
    for dim, size in enumerate(shape):
        parts = mesh.parts(fits, dim)
        if size % parts:
            raise OptionError(
                f"{what} of shape {list(shape)} cannot be split over the mesh ({mesh}): "
                f"{mesh.describe(fits)} needs a dimension {dim} that {parts} divides, not {size}. "
                + advice
            )
    return fits

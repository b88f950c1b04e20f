"""Describes meshes of devices, and how tensors and steps are spread over them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Placement = tuple[int | None, ...]
"""For each dimension of a mesh the dimension of a tensor that is split over it; None: none is."""


@dataclass(frozen=True)
class Mesh:
    """A grid of devices with named dimensions, like torch's `DeviceMesh`.

    Attributes:
        names: Names of its dimensions.
        sizes: Sizes of its dimensions.
        devices: Which of the platform's devices are in it, in row-major order.
        kind: torch's name of their type; empty: whatever the backend computes on.
        of_ranks: Whether each is of a process of its own: device n is the one of rank n.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    devices: tuple[int, ...]
    kind: str = ""
    of_ranks: bool = False

    @property
    def size(self) -> int:
        """Returns the number of devices."""
        return math.prod(self.sizes)

    @property
    def replicated(self) -> Placement:
        """The placement of a tensor that is replicated on all devices."""
        return (None,) * len(self.sizes)

    def shard_count(self, placement: Placement, dim: int) -> int:
        """Returns the number of shards along one tensor dimension."""
        return math.prod(n for n, d in zip(self.sizes, placement, strict=True) if d == dim)

    def shard_shape(self, placement: Placement, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns one device's shard shape from a tensor's global shape."""
        return tuple(n // self.shard_count(placement, d) for d, n in enumerate(shape))

    def global_shape(self, placement: Placement, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns a tensor's global shape from one device's shard shape."""
        return tuple(n * self.shard_count(placement, d) for d, n in enumerate(shape))

    def can_shard(self, placement: Placement, shape: Sequence[int]) -> bool:
        """Returns whether all sharded dimensions exist and are evenly divisible."""
        dims = len(shape)
        named = all(d is None or -dims <= d < dims for d in placement)
        return named and not any(n % self.shard_count(placement, d) for d, n in enumerate(shape))

    def describe(self, placement: Placement) -> str:
        """Formats a placement as text, such as "Shard(0) over data" or "Replicate"."""
        over: dict[int, list[str]] = {}
        for name, dim in zip(self.names, placement, strict=True):
            if dim is not None:
                over.setdefault(dim, []).append(name)
        texts = [f"Shard({dim}) over {' and '.join(names)}" for dim, names in over.items()]
        return ", ".join(texts) or "Replicate"

    def __str__(self) -> str:
        """Returns names and sizes, such as "data=4, model=2"."""
        return ", ".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True))


@dataclass(frozen=True)
class InputPlacement:
    """The name of a graph input and its placement on a mesh.

    Attributes:
        name: As users write it.
        placement: How it is split.
    """

    name: str
    placement: Placement


@dataclass(frozen=True)
class MeshLayout:
    """The placements of all inputs and outputs of a step's graph on a mesh.

    Attributes:
        inputs: One per input.
        outputs: One per output.
        parameters: Names of parameters as users write them, by the position of their input.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    parameters: Mapping[int, str]


@dataclass(frozen=True)
class ParameterPlacement:
    """A parameter with its placement, and the bytes that one device holds of it.

    Attributes:
        name: As in the user's code: "model.fc.weight".
        value: Data type and shape, such as "float32[512, 128]".
        placement: Such as "Shard(0) over data", or "Replicate".
        bytes: How much of it one device has.
    """

    name: str
    value: str
    placement: str
    bytes: int


@dataclass(frozen=True)
class CollectiveSummary:
    """The count and bytes of one kind of collective in a compiled program.

    Attributes:
        kind: XLA's name, such as "all-reduce".
        count: How many there are in the compiled program; those in a loop count once.
        bytes: What one device gets from them in a step.
    """

    kind: str
    count: int
    bytes: int


@dataclass(frozen=True)
class MeshReport:
    """Report of a step on a mesh: placements, collectives and memory per device.

    Attributes:
        mesh: Names and sizes of its dimensions, such as "data=4, model=2".
        parameters: Each with its placement.
        collectives: In the compiled program, one entry for each kind.
        argument_bytes: What one device holds of parameters, state and batch.
        temporary_bytes: What it needs beside these while it runs.
        output_bytes: What it gets of results; what is updated is not counted twice.
    """

    mesh: str
    parameters: tuple[ParameterPlacement, ...]
    collectives: tuple[CollectiveSummary, ...]
    argument_bytes: int
    temporary_bytes: int
    output_bytes: int

    def __str__(self) -> str:
        """Returns a line for each parameter and each kind of collective."""
        lines = [f"on a mesh ({self.mesh}), for each device:"]
        held = self.argument_bytes, self.temporary_bytes, self.output_bytes
        arguments, temporaries, outputs = map(format_bytes, held)
        lines.append(
            f"  parameters, state and batch {arguments}, temporaries {temporaries}, "
            f"results {outputs}"
        )
        lines += [
            f"  {c.kind}: {c.count} in a step, {format_bytes(c.bytes)}" for c in self.collectives
        ]
        lines += [
            f"  {p.name} {p.value}: {p.placement}, {format_bytes(p.bytes)}" for p in self.parameters
        ]
        return "\n".join(lines)


def format_bytes(count: int) -> str:
    """Formats a number of bytes: "512 B", "1.5 KiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"

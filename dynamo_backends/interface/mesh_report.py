"""What becomes of a training step on a mesh of devices."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PlacedParameter:
    """Where a parameter of a step is on a mesh.

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
class Collective:
    """Operations of one kind by which the devices of a mesh talk to each other.

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
    """A step as it is spread over a mesh.

    Attributes:
        mesh: Names and sizes of its dimensions, such as "data=4, model=2".
        parameters: Each with its placement.
        collectives: In the compiled program, one entry for each kind.
        argument_bytes: What one device holds of parameters, state and batch.
        temporary_bytes: What it needs beside these while it runs.
        output_bytes: What it gets of results; what is updated is not counted twice.
    """

    mesh: str
    parameters: tuple[PlacedParameter, ...]
    collectives: tuple[Collective, ...]
    argument_bytes: int
    temporary_bytes: int
    output_bytes: int

    def __str__(self) -> str:
        """Returns a line for each parameter and each kind of collective."""
        lines = [f"on a mesh ({self.mesh}); on each device:"]
        held = self.argument_bytes, self.temporary_bytes, self.output_bytes
        arguments, temporaries, outputs = map(size_text, held)
        lines.append(
            f"  parameters, state and batch {arguments}, temporaries {temporaries}, "
            f"results {outputs}"
        )
        lines += [
            f"  {c.kind}: {c.count} in a step, {size_text(c.bytes)}" for c in self.collectives
        ]
        lines += [
            f"  {p.name} {p.value}: {p.placement}, {size_text(p.bytes)}" for p in self.parameters
        ]
        return "\n".join(lines)


def size_text(count: int) -> str:
    """Returns a number of bytes for people: "512 B", "1.5 KiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"

"""What is said of a program that is spread over a mesh."""

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from dynamo_backends.graph.liveness import tensor_bytes
from dynamo_backends.interface.mesh import Mesh, Placed
from dynamo_backends.interface.mesh_report import Collective, MeshReport, PlacedParameter
from dynamo_backends.xla import _jaxlib

_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_CALL = re.compile(rf" = (.*?) ({'|'.join(_KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\]")


def collectives_of(program: str) -> tuple[Collective, ...]:
    """Returns what devices exchange, one entry for each kind that there is.

    Args:
        program: XLA's text of a module for one device: a line for each operation.
    """
    sizes: dict[str, list[int]] = {}
    for line in program.splitlines():
        if (found := _CALL.search(line)) is not None:
            arrays = [_bytes(*each) for each in _ARRAY.findall(found[1])]
            # What a start returns has its operands beside its results.
            size = max(arrays, default=0) if found[3] else sum(arrays)
            sizes.setdefault(found[2], []).append(size)
    return tuple(Collective(k, len(sizes[k]), sum(sizes[k])) for k in _KINDS if k in sizes)


def _bytes(letters: str, bits: str, shape: str) -> int:
    width = 1 if letters == "pred" else math.ceil(int(bits or 0) / 8)
    return width * math.prod(int(n) for n in shape.split(",") if n)


def mesh_report(
    mesh: Mesh, executable: Any, parameters: Sequence[tuple[Placed, Tensor]]
) -> MeshReport:
    """Returns where everything is, and what devices exchange.

    Args:
        mesh: The mesh.
        executable: Compiled for it.
        parameters: Each with a fake tensor like it.
    """
    memory = _jaxlib.memory_of(executable)
    return MeshReport(
        mesh=str(mesh),
        parameters=tuple(_parameter(mesh, *each) for each in parameters),
        collectives=collectives_of(_jaxlib.program_text(executable)),
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
    )


def _parameter(mesh: Mesh, placed: Placed, value: Tensor) -> PlacedParameter:
    parts = [mesh.parts(placed.placement, d) for d in range(value.dim())]
    return PlacedParameter(
        name=placed.name,
        value=f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}",
        placement=mesh.describe(placed.placement),
        bytes=tensor_bytes(value) // int(np.prod(parts)),
    )

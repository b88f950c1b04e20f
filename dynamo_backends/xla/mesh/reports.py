"""What is said of a program that is spread over a mesh."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from dynamo_backends.graph.liveness import tensor_bytes
from dynamo_backends.interface.mesh import Mesh, Placed
from dynamo_backends.interface.mesh_report import MeshReport, PlacedParameter
from dynamo_backends.xla import _jaxlib
from dynamo_backends.xla.mesh.collectives import collectives_of


def mesh_report(
    mesh: Mesh, executable: Any, parameters: Sequence[tuple[Placed, Tensor]]
) -> MeshReport:
    """Where everything is, and what devices exchange.

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

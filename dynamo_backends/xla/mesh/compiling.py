"""Compiles traced programs for a mesh of devices."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

from dynamo_backends.interface.errors import as_compile_error
from dynamo_backends.xla import _jaxlib, prologue
from dynamo_backends.xla.mesh.devices import MeshDevice
from dynamo_backends.xla.mesh.splits import Splits
from dynamo_backends.xla.repeated import may_fuse_products


def lower_split(
    program: Any, device: MeshDevice, splits: Splits, what: str, donated: Sequence[int] = ()
) -> Any:
    """StableHLO with shardings.

    Args:
        program: A jaxpr.
        device: All devices of the mesh.
        splits: How its inputs and outputs are split.
        what: Is lowered, for errors.
        donated: Inputs whose memory it may have.

    Raises:
        CompileError: jax refuses it.
    """
    with as_compile_error(f"jax cannot lower the {what} for the mesh"):
        function = jax.jit(
            prologue.as_function(program),
            in_shardings=tuple(splits.inputs),
            out_shardings=splits.outputs,
            donate_argnums=tuple(donated),
            keep_unused=True,
        )
        traced = function.trace(*prologue.avals(program))
        return traced.lower(lowering_platforms=(device.platform,))


def compile_lowered(lowered: Any, program: core.ClosedJaxpr, device: MeshDevice, what: str) -> Any:
    """Returns what runs StableHLO on all devices of a mesh.

    Processes take their temporary memory from the system anew in each step, and pay for each page.
    So their gradients are not all kept until the last one is there. Devices of one process have
    them summed together: they are threads, which seldom run all at once.

    Args:
        lowered: The StableHLO.
        program: That it was lowered from.
        device: All devices of the mesh.
        what: It is, for errors.

    Raises:
        CompileError: XLA refuses it.
    """
    with as_compile_error(f"XLA cannot compile the {what} for the mesh"):
        module = _jaxlib.bytecode(lowered)
        apart = device.ranks is not None
        return _jaxlib.compile_split(
            device.client,
            device.handles,
            module,
            reduces_apart=apart,
            fuses_products=may_fuse_products(program),
        )

"""Where the tensors of a fusion have to be. The one place that says on what nvFuser runs."""

import torch
from torch import Tensor

from dynamo_backends.graph.graph import Graph, foreign_input
from dynamo_backends.interface.errors import DeviceError

TYPE = "cuda"
"""The type of device that nvFuser compiles for."""


def is_present() -> bool:
    """Returns whether this machine has such a device and torch can use it."""
    return TYPE != "cuda" or torch.cuda.is_available()


def why_not(value: Tensor) -> str | None:
    """Returns why a fusion cannot read a tensor where it is; None if it can.

    Numbers (tensors of no dimension) may be on the CPU, as in eager; they are copied to the device.
    """
    kind = value.device.type
    if kind == TYPE or (kind == "cpu" and not value.ndim):
        return None
    return f"nvFuser does not read {kind} memory"


def require_device(graph: Graph, backend: str) -> None:
    """Raises `DeviceError` if an input that is no number is on another type of device."""
    found = foreign_input(graph, TYPE)
    if found is not None:
        raise DeviceError(
            f"{backend} compiles for {TYPE} devices, and an input is on {found.device.type}; "
            f"move the model and its inputs, for example by model.to({TYPE!r}), or use another "
            "backend, such as 'inductor' or 'openxla'."
        )

"""Where the tensors of a graph have to be, and whether there is such a device."""

from collections.abc import Iterable

import torch
from torch import Tensor, fx

from dynamo_backends.graph.calls import tensors
from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.errors import DeviceError


def foreign_input(graph: Graph, kind: str) -> Tensor | None:
    """The first input that is on another type of device; numbers (0-d tensors) may be anywhere."""
    for node in graph.placeholders:
        value = node.meta["val"]
        if isinstance(value, Tensor) and value.device.type != kind and value.ndim:
            return value
    return None


def device_index(nodes: Iterable[fx.Node], kind: str) -> int | None:
    """Index of the device of a type that the first such tensor of nodes is on; None without any."""
    found = (t.device for n in nodes for t in tensors(n.meta.get("val")) if t.device.type == kind)
    device = next(found, None)
    return None if device is None else device.index or 0


def require_cpu(graph: Graph, backend: str, more: str = "") -> None:
    """Raises `DeviceError` if an input is on another device than the CPU; numbers may be anywhere.

    Args:
        graph: The graph.
        backend: Its name.
        more: What else to say of what can be done.
    """
    found = foreign_input(graph, "cpu")
    if found is not None:
        raise DeviceError(
            f"{backend} reads tensors on the CPU, and an input is on {found.device.type}; move "
            f"the model and its inputs to the CPU.{more}"
        )


def why_no_cuda() -> str | None:
    """Why torch has no CUDA device; None if it has one."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return None

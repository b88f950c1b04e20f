"""Moves models and tensors to a device whose memory torch does not share."""

from collections.abc import Iterator
from typing import TypeVar

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dynamo_backends.graph.decomposition_tables import decomposition_table
from dynamo_backends.interface.errors import DeviceError
from dynamo_backends.runtime.device_moves import move_keeping_aliases
from dynamo_backends.runtime.device_tensor import move_leaf
from dynamo_backends.runtime.device_values import (
    RemoteDevice,
    device_by_name,
    operator_runner,
    register_operator_runner,
)
from dynamo_backends.runtime.foreign_devices import refuse_foreign_move
from dynamo_backends.xla.options import parse_device_name
from dynamo_backends.xla.runtime import PjrtDevice, open_device
from dynamo_backends.xla.single_op_programs import EagerOpRunner

T = TypeVar("T")


def to_device(values: T, device: str) -> T:
    """Moves a model, a tensor, or tensors in lists and dicts, to a device.

    To torch they stay tensors of the CPU, whose contents come to the host when they are read.
    Graphs that `openxla` compiles of them run on the device, and what these return stays there.

    Examples:
        >>> model = to_device(model, "tpu:0")
        >>> batch = to_device(batch, "tpu:0")
        >>> loss = torch.compile(model, backend="openxla")(batch)

    Args:
        values: A model is changed in place, its parameters stay the same objects, and those that
            share memory still do. Of each tensor a copy with memory of its own is returned, of a
            tensor with `requires_grad` a leaf.
        device: "tpu", or one of several, "tpu:1". "cpu" brings values back.

    Raises:
        DeviceError: There is no such device, or torch shares its memory and has a name for it, or
            another package runs it, or values are on a device of another package.
    """
    model = values if isinstance(values, nn.Module) else None
    refuse_foreign_move(pytree.tree_leaves(values) if model is None else _tensors_of(model), device)
    home = _home(device)
    if model is not None:
        move_keeping_aliases(_tensors_of(model), home)
        return values
    result: T = pytree.tree_map_only(Tensor, lambda t: move_leaf(t, home), values)
    return result


def _home(device: str) -> RemoteDevice | None:
    parts = parse_device_name(device)
    if parts is None or parts[0] == "cuda":
        raise DeviceError(
            "to_device supports 'cpu', 'tpu', or one of several devices such as 'tpu:1', not "
            f"{device!r}. For devices that torch supports use tensor.to(device)."
        )
    opened = open_device(*parts)
    return device_by_name(register_eager_device(opened)) if opened.is_remote else None


def register_eager_device(device: PjrtDevice) -> str:
    """Registers a device for eager operators, if it is not yet; returns its name."""
    if operator_runner(device.name) is None:
        import dynamo_backends.xla.lowering  # noqa: F401 - fills the table
        from dynamo_backends.xla.lowering.registry import lookup, overloads

        table = decomposition_table(keep=frozenset(overloads()))
        register_operator_runner(device.name, EagerOpRunner(device, lookup, table))
    return device.name


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Parameters, their gradients, and buffers."""
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from model.buffers()

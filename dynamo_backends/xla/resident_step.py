"""Training steps whose parameters and state live on a device that shares no memory with torch.

What a step updates is donated: the device writes the new contents over the old ones. It is moved
there before the first step, and stays there until somebody reads it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.graph.graph import Graph, Role
from dynamo_backends.graph.layouts import InputConverter, OutputConverter
from dynamo_backends.interface.errors import RankError, StepCaptureError
from dynamo_backends.interface.executable import StepProgram
from dynamo_backends.interface.forks import check_not_forked
from dynamo_backends.runtime.atomic_copies import defer_signals
from dynamo_backends.runtime.device_tensor import DeviceTensor, copy_to_device
from dynamo_backends.runtime.device_values import DeviceValue, fills_storage, storage_value
from dynamo_backends.runtime.weight_binding import value_bits
from dynamo_backends.xla import _jaxlib
from dynamo_backends.xla.device_arrays import copy_on_device, wrap_device_outputs
from dynamo_backends.xla.runtime import PjrtDevice

ORIGIN = "a training step"


class ResidentStep(StepProgram):
    """A step on a device that shares no memory with torch.

    Args:
        device: Where it runs.
        graph: The graph.
        executable: Compiled from it; it donates the inputs that are updated.
    """

    def __init__(self, device: PjrtDevice, graph: Graph, executable: Any):
        self.executable = executable
        self._device = device
        values = [p.meta["val"] for p in graph.placeholders]
        self._updated = [i for i, x in enumerate(graph.inputs) if x.updated_by is not None]
        self._others = [i for i, x in enumerate(graph.inputs) if x.updated_by is None]
        self._importers = [InputConverter(v) for v in values]
        promised = [n.meta["val"] for n in graph.outputs[len(self._updated) :]]
        self._exporters = [OutputConverter(v) for v in promised]
        self._dtypes = [v.dtype for v in promised]
        self._execute = self._caller()
        # Learning rates and the like, which seldom change, and constants.
        self._few = {0, *(i for i, x in enumerate(graph.inputs) if x.role is Role.CONSTANT)}
        self._known: dict[int, DeviceTensor] = {}
        self._residents: dict[int, tuple[Tensor, DeviceValue]] = {}

    def __call__(self, inputs: Sequence[Tensor], taken: list[Any]) -> None:
        """See `StepProgram.__call__`."""
        check_not_forked(self._device.pid, "XLA")
        residents = [self._resident(inputs[i], i) for i in self._updated]
        buffers: list[Any] = [None] * len(inputs)
        for place, (_, value) in zip(self._updated, residents, strict=True):
            buffers[place] = self._array(place, inputs[place], value)
            if value.is_shared:
                buffers[place] = self._duplicated(place, buffers[place])
        for place in self._others:
            buffers[place] = self._take_in(place, self._same(place, inputs[place]))
        given_away = [buffers[i] for i in self._updated]
        self._keep_apart(buffers)
        self.launches += 1
        with defer_signals():
            try:
                results = self._device.execute(self._execute, buffers)
            except RankError:
                raise
            except Exception as error:
                if not any(array.is_deleted() for array in given_away):
                    raise
                raise StepCaptureError(
                    f"XLA failed while it ran a training step ({error}). Parameters and optimizer "
                    "states are lost. Load the last checkpoint."
                ) from error
            for (handle, value), array in zip(residents, results, strict=False):
                value.set_device_array(handle, array, ORIGIN)
            torch.autograd.graph.increment_version([inputs[i] for i in self._updated])
            taken.append(results[len(residents) :])

    def _caller(self) -> Callable[[list[Any]], list[Any]]:
        """From buffers for the program to its results."""
        return _jaxlib.make_single_device_call(self.executable, self._device.handle)

    def _same(self, place: int, tensor: Tensor) -> Tensor:
        """Returns an equal value that is on the device already: numbers, constants."""
        if place not in self._few or isinstance(tensor, DeviceTensor):
            return tensor
        known = self._known.get(place)
        if known is None or not torch.equal(value_bits(known.host()), value_bits(tensor)):
            known = self._known[place] = copy_to_device(tensor, self._device)
        return known

    def _take_in(self, place: int, tensor: Tensor) -> Any:
        """Uploads an input to the device."""
        array: Any = self._device.take_in([self._importers[place]], [tensor])[0]
        return array

    def _duplicated(self, place: int, array: Any) -> Any:
        """Returns a copy of an input, which may be given away."""
        return copy_on_device(self._device, array, self._importers[place].dtype)

    def _array(self, place: int, tensor: Tensor, value: DeviceValue) -> Any:
        importer, array = self._importers[place], value.array
        if array is not None and not value.is_exposed and array.shape == importer.dense_shape:
            return array
        return self._take_in(place, tensor)

    def _resident(self, tensor: Tensor, place: int) -> tuple[Tensor, DeviceValue]:
        """Returns the handle of an input that is updated, and its contents."""
        found = self._residents.get(place)
        if found is not None and found[0] is getattr(tensor, "_handle", None):
            return found
        self._settle(place, tensor)
        if not isinstance(tensor, DeviceTensor) or tensor.home != self._device.name:
            raise StepCaptureError(
                f"the step updates input {place}, which is not on {self._device.name}. Move models "
                "there with dynamo_backends.xla.to_device before training."
            )
        handle = tensor._handle
        if not fills_storage(handle):
            raise StepCaptureError(
                f"the step updates input {place}, which is a view of a larger tensor. Clone it."
            )
        value = storage_value(handle)
        assert value is not None
        self._residents[place] = handle, value
        return handle, value

    def _settle(self, place: int, tensor: Tensor) -> None:
        """Moves to the device what nobody has moved there; by default nothing."""

    def _keep_apart(self, buffers: list[Any]) -> None:
        """Copies what is donated and also read under another name."""
        updated = {id(buffers[i]) for i in self._updated}
        for i in self._others:
            if id(buffers[i]) in updated:
                buffers[i] = self._duplicated(i, buffers[i])

    def outputs(self, taken: list[Any]) -> list[Tensor]:
        """See `StepProgram.outputs`."""
        return wrap_device_outputs(self._device, self._exporters, taken[0], self._dtypes, ORIGIN)

    def dump(self) -> dict[str, bytes] | None:
        """See `StepProgram.dump`."""
        code = _jaxlib.serialize(self._device.client, self.executable)
        return {"main": code, "updates": b"resident"}

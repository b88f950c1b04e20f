"""Runs whole training steps on XLA, which writes parameters and state where they are.

What stops a step finds the state of before it or of after it (see `launch`).
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from torch import Tensor

from dynamo_backends._torch_private import from_dlpack
from dynamo_backends.aot.step.program.programs import CopyingProgram
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import InputConverter, OutputConverter
from dynamo_backends.interface.executable import StepProgram
from dynamo_backends.interface.forks import check_not_forked
from dynamo_backends.xla import _jaxlib
from dynamo_backends.xla.dtypes import to_jax
from dynamo_backends.xla.owned_memory import find_owned, move_to_xla
from dynamo_backends.xla.runtime import PjrtDevice
from dynamo_backends.xla.updating import Launch


def in_one_dimension(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns a `ShapeDtypeStruct` flattened to one dimension.

    XLA's loops use vectors along the last dimension only, and an update needs no other.
    """
    shape = (math.prod(array.shape),) if len(array.shape) > 1 else array.shape
    return jax.ShapeDtypeStruct(shape, array.dtype)


class _Interface:
    """The layout of a compiled step's inputs and outputs.

    Args:
        device: A CPU.
        graph: What was compiled.

    Attributes:
        updated: Positions of the inputs that are updated; the first results are their contents.
        others: Positions of the others.
        importers: One per input.
        exporters: One per result.
    """

    def __init__(self, device: PjrtDevice, graph: Graph):
        values = [p.meta["val"] for p in graph.placeholders]
        self._device = device
        self.updated = [i for i, x in enumerate(graph.inputs) if x.updated_by is not None]
        self.others = [i for i, x in enumerate(graph.inputs) if x.updated_by is None]
        self.importers = [InputConverter(v) for v in values]
        # What is updated keeps its layout.
        promised = [values[i] for i in self.updated]
        promised += [n.meta["val"] for n in graph.outputs[len(promised) :]]
        self.exporters = [OutputConverter(v) for v in promised]
        storages = [self.importers[i].storage for i in self.updated]
        storages += [e.storage for e in self.exporters[len(storages) :]]
        self._shapes = [s.dense_shape(v.shape) for v, s in zip(promised, storages, strict=True)]
        dtypes = [to_jax(v.dtype) for v in promised]
        self.results = list(map(jax.ShapeDtypeStruct, self._shapes, dtypes))
        for k in range(len(self.updated)):
            self.results[k] = in_one_dimension(self.results[k])

    def take_in(self, place: int, tensor: Tensor) -> Any:
        """Returns a buffer on an input, or on a copy of it; XLA compares sizes, not shapes."""
        return self._device.import_tensor(self.importers[place](tensor).detach())

    def hand_out(self, buffers: Sequence[Any], first: int = 0) -> list[Tensor]:
        """Returns the results from `first` on as tensors."""
        tensors = map(from_dlpack, map(_jaxlib.export_dlpack, buffers[first:]))
        dense = map(Tensor.view, tensors, self._shapes[first:])
        return [e(t) for e, t in zip(self.exporters[first:], dense, strict=True)]


class XlaStep(StepProgram):
    """A step on the CPU.

    Args:
        device: Where it runs.
        graph: The graph.
        executable: Compiled from it; it donates the inputs that are updated.

    Attributes:
        executable: The same.
        temporary_bytes: How much memory a call takes beside inputs and outputs.
    """

    def __init__(self, device: PjrtDevice, graph: Graph, executable: Any):
        self.executable = executable
        self._device = device
        self._interface = _Interface(device, graph)
        self._execute = _jaxlib.make_lazy_device_call(
            executable, device.handle, self._interface.results
        )
        self.temporary_bytes = _jaxlib.temporary_bytes(executable)

    def __call__(self, inputs: Sequence[Tensor], taken: list[Any]) -> None:
        """See `StepProgram.__call__`."""
        check_not_forked(self._device.pid, "XLA")
        interface = self._interface
        owned = [find_owned(x) for x in inputs]
        for i in interface.updated:
            if owned[i] is None:
                owned[i] = move_to_xla(inputs[i], interface.importers[i], self._device)
        buffers = [
            owner.buffer if owner is not None else interface.take_in(i, inputs[i])
            for i, owner in enumerate(owned)
        ]
        updated = [owned[i] for i in interface.updated]
        for i in interface.others:  # nothing is given away and read under another name
            if owned[i] is not None and owned[i] in updated:
                buffers[i] = interface.take_in(i, inputs[i].clone())
        copied_inputs = [
            interface.importers[i].to_program_order(inputs[i])
            for i in interface.updated
            if not owned[i]
        ]
        tensors = [inputs[i] for i in interface.updated]
        self.launches += 1
        Launch(tensors, updated, copied_inputs, taken).run(self._execute(buffers))

    def outputs(self, taken: list[Any]) -> list[Tensor]:
        """See `StepProgram.outputs`."""
        return self._interface.hand_out(taken[0], len(self._interface.updated))

    def dump(self) -> dict[str, bytes]:
        """See `StepProgram.dump`."""
        code = _jaxlib.serialize(self._device.client, self.executable)
        return {"main": code, "updates": b"donated"}


class XlaCopyingStep(CopyingProgram):
    """A step on the CPU that computes what it updates apart: XLA is given nothing that it may lose.

    Args:
        device: Where it runs.
        graph: The graph.
        executable: Compiled from it; it donates nothing.
    """

    def __init__(self, device: PjrtDevice, graph: Graph, executable: Any):
        super().__init__(graph, self._compute)
        self.executable = executable
        self._device = device
        self._interface = _Interface(device, graph)

    def _compute(self, inputs: list[Tensor]) -> list[Tensor]:
        check_not_forked(self._device.pid, "XLA")
        buffers = [self._interface.take_in(i, x) for i, x in enumerate(inputs)]
        return self._interface.hand_out(self.executable.execute(buffers))

    def dump(self) -> dict[str, bytes]:
        """See `StepProgram.dump`."""
        code = _jaxlib.serialize(self._device.client, self.executable)
        return {"main": code, "updates": b"copied"}

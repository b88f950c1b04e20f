"""Runs whole training steps on XLA, which writes parameters and state where they are.

Everything is made ready before the run, the run is one call of C code, and nothing that matters has
to be done after it. So a signal, or an error of anybody's, finds the state of before the step or of
after it. XLA's CPU client reserves all memory before it writes; what it runs after that cannot
report an error, but for calls of libraries. Programs with such calls are run without donation (see
`steps.compile_step`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, compress
from typing import Any

import jax
import torch
from torch import Tensor

from dynamo_backends._torch_private import from_dlpack
from dynamo_backends.aot.step.atomic import at_once, give_up, until_done
from dynamo_backends.aot.step.programs import CopyingProgram, StepProgram
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import Exporter, Importer
from dynamo_backends.interface.errors import StepCaptureError
from dynamo_backends.interface.forks import check_process
from dynamo_backends.runtime.arena import memory_for
from dynamo_backends.xla import _jaxlib
from dynamo_backends.xla.dtypes import to_jax
from dynamo_backends.xla.owned_memory import OwnedBuffer, find_owned, move_to_xla
from dynamo_backends.xla.runtime import Device


def in_one_dimension(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """What a step is given, and returns, of an array that it updates; for matrices and the like.

    XLA's loops use vectors along the last dimension only, and an update needs no other.
    """
    shape = (math.prod(array.shape),) if len(array.shape) > 1 else array.shape
    return jax.ShapeDtypeStruct(shape, array.dtype)


class _Interface:
    """How tensors get into a compiled step and out of it.

    Args:
        device: A CPU.
        graph: What was compiled.

    Attributes:
        updated: Positions of the inputs that are updated; the first results are their contents.
        others: Positions of the others.
        importers: One per input.
        exporters: One per result.
    """

    def __init__(self, device: Device, graph: Graph):
        values = [p.meta["val"] for p in graph.placeholders]
        self._device = device
        self.updated = [i for i, x in enumerate(graph.inputs) if x.updated_by is not None]
        self.others = [i for i, x in enumerate(graph.inputs) if x.updated_by is None]
        self.importers = [Importer(v) for v in values]
        # What is updated keeps its layout.
        promised = [values[i] for i in self.updated]
        promised += [n.meta["val"] for n in graph.outputs[len(promised) :]]
        self.exporters = [Exporter(v) for v in promised]
        storages = [self.importers[i].storage for i in self.updated]
        storages += [e.storage for e in self.exporters[len(storages) :]]
        self._shapes = [s.dense_shape(v.shape) for v, s in zip(promised, storages, strict=True)]
        dtypes = [to_jax(v.dtype) for v in promised]
        self.results = list(map(jax.ShapeDtypeStruct, self._shapes, dtypes))
        for k in range(len(self.updated)):
            self.results[k] = in_one_dimension(self.results[k])

    def take_in(self, place: int, tensor: Tensor) -> Any:
        """A buffer on an input, or on a copy of it; XLA compares sizes, not shapes."""
        return self._device.import_tensor(self.importers[place](tensor).detach())

    def hand_out(self, buffers: Sequence[Any], first: int = 0) -> list[Tensor]:
        """The results from `first` on as tensors."""
        tensors = map(from_dlpack, map(_jaxlib.export_dlpack, buffers[first:]))
        dense = map(Tensor.view, tensors, self._shapes[first:])
        return [e(t) for e, t in zip(self.exporters[first:], dense, strict=True)]


class XlaStep(StepProgram):
    """A step on the CPU.

    Args:
        device: Where it runs.
        graph: The graph.
        executable: Compiled from it; it donates the inputs that are updated.
        reserve: Whether memory of temporaries is kept between steps.
    """

    def __init__(self, device: Device, graph: Graph, executable: Any, reserve: bool = True):
        self.executable = executable
        self._device = device
        self._interface = _Interface(device, graph)
        self._execute = _jaxlib.executor(executable, device.handle, self._interface.results)
        self._kept_memory = memory_for(_jaxlib.temporary_bytes(executable), reserve)

    def __call__(self, inputs: Sequence[Tensor], taken: list[Any]) -> None:
        """See `StepProgram.__call__`."""
        check_process(self._device.pid, "XLA")
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
            interface.importers[i].view(inputs[i]) for i in interface.updated if not owned[i]
        ]
        tensors = [inputs[i] for i in interface.updated]
        self.launches += 1
        with self._kept_memory:
            _Launch(tensors, updated, copied_inputs, taken).run(self._execute(buffers))

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

    def __init__(self, device: Device, graph: Graph, executable: Any):
        super().__init__(graph, self._compute)
        self.executable = executable
        self._device = device
        self._interface = _Interface(device, graph)

    def _compute(self, inputs: list[Tensor]) -> list[Tensor]:
        check_process(self._device.pid, "XLA")
        buffers = [self._interface.take_in(i, x) for i, x in enumerate(inputs)]
        return self._interface.hand_out(self.executable.execute(buffers))

    def dump(self) -> dict[str, bytes]:
        """See `StepProgram.dump`."""
        code = _jaxlib.serialize(self._device.client, self.executable)
        return {"main": code, "updates": b"copied"}


class _Launch:
    """One run, and where its results belong.

    Args:
        tensors: What is updated; the first results are their new contents.
        owned: Where each lives, if in memory of XLA's.
        copied_inputs: The memory of the others, in the order of dimensions of the results.
        taken: Gets the results when all contents are new.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        owned: Sequence[OwnedBuffer | None],
        copied_inputs: list[Tensor],
        taken: list[Any],
    ):
        self._residents = [
            (place, owner, tensor)
            for place, (owner, tensor) in enumerate(zip(owned, tensors, strict=True))
            if owner is not None
        ]
        self._is_copied = [owner is None for owner in owned]
        self._guests = copied_inputs
        self._taken = taken

    def run(self, results: Iterator[list[Any]]) -> None:
        """Executes the step.

        Args:
            results: Executes it when the only element is taken, and gives its results; in C.

        Raises:
            StepCaptureError: XLA failed in the middle; what it had been given is lost.
            BaseException: Whatever stopped it, before or after the step.
        """
        found: list[list[Any]] = []
        contents: list[Tensor] = []
        torch.autograd.graph.increment_version([tensor for _, _, tensor in self._residents])
        for place, owner, _ in self._residents:
            owner.expect(found, place)
        actions: list[Callable[[], Any]] = [partial(found.extend, results)]
        if self._guests:
            arrived = compress(chain.from_iterable(found), self._is_copied)
            exported = map(from_dlpack, map(_jaxlib.export_dlpack, arrived))
            shaped = map(Tensor.view, exported, [guest.shape for guest in self._guests])
            actions.append(partial(contents.extend, shaped))
            actions.append(partial(torch._foreach_copy_, self._guests, contents))
        try:
            at_once([*actions, partial(self._taken.extend, chain(found))])
        except BaseException as error:
            if not found:
                self._check_survival(error)
            else:
                until_done(partial(self._settle, found))
            raise
        self._settle(found)

    def _settle(self, found: list[list[Any]]) -> None:
        """Does what is left to do, if anything is; may be repeated."""
        if not self._taken:
            arrived = compress(found[0], self._is_copied)
            for guest, result in zip(self._guests, arrived, strict=True):
                guest.copy_(from_dlpack(_jaxlib.export_dlpack(result)).view(guest.shape))
            self._taken.extend(found)
        for _, owner, _ in self._residents:
            owner.settle()

    def _check_survival(self, error: BaseException) -> None:
        """After a failed execution: memory that XLA has given up must not be read any more."""
        lost = [tensor for _, owner, tensor in self._residents if owner.buffer.is_deleted()]
        if lost:
            until_done(partial(give_up, lost))
            raise StepCaptureError(
                f"XLA failed in the middle of a step ({error}) and {len(lost)} parameters and "
                "states are lost; they are NaN now. Load the last checkpoint."
            ) from error

"""Runs graphs on XLA that write to their inputs, where these are: key-value caches, counters.

The inputs that a graph updates move into memory of XLA's (`owned_memory`) at the first call, and
are donated at each. What has to stay where it is, because others see its memory, gets its new
contents copied in the same run (`launch`).
"""

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress
from typing import Any

import jax
import torch
from torch import Tensor

from dynamo_backends._torch_private import from_dlpack
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import InputConverter
from dynamo_backends.interface.errors import StepCaptureError
from dynamo_backends.interface.executable import Bound
from dynamo_backends.interface.forks import check_not_forked
from dynamo_backends.runtime.atomic_copies import (
    call_uninterrupted,
    fill_lost_tensors,
    retry_until_complete,
)
from dynamo_backends.xla import _jaxlib
from dynamo_backends.xla.arrays import track_output_buffer
from dynamo_backends.xla.dtypes import to_jax
from dynamo_backends.xla.owned_memory import OwnedBuffer, find_owned, move_to_xla
from dynamo_backends.xla.runtime import PjrtDevice, Staging, XlaExecutable, XlaInputMap


def find_donatable_inputs(
    graph: Graph, read: Collection[int], device: PjrtDevice
) -> tuple[int, ...]:
    """Returns positions of activations that can be donated and updated in place.

    Args:
        graph: What is compiled.
        read: The activations that the program reads; only they can be donated, and come first: jax
            gives an input's memory to the first result that is like it.
        device: Where it will run.
    """
    values = [n.meta["val"] for n in (*graph.placeholders, *graph.outputs)]
    if device.platform != "cpu" or any(v.device.type != "cpu" for v in values if _is_tensor(v)):
        return ()
    updated = [graph.activations.index(i) for i in graph.updates]
    return tuple(sorted(updated, key=lambda i: (i not in read, i)))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def results_order(graph: Graph, updated: Sequence[int]) -> list[int]:
    """Returns output positions in program order: updated inputs first.

    Args:
        graph: What is compiled.
        updated: See `XlaInputMap`.
    """
    first = [graph.updates[graph.activations[i]] for i in updated]
    return first + [k for k in range(len(graph.outputs)) if k not in first]


def executable_for(graph: Graph) -> type[XlaExecutable]:
    """Returns the class of executables for a graph, by whether it updates inputs."""
    return XlaUpdatingExecutable if graph.updates else XlaExecutable


class XlaUpdatingExecutable(XlaExecutable):
    """A compiled graph that updates inputs.

    Args:
        device: Where it runs.
        graph: See `XlaExecutable`.
        main: The loaded executable, to which `wiring.updated` are donated.
        prologue: See `XlaExecutable`.
        wiring: See `XlaExecutable`; if nothing is updated in it, all results are new.
    """

    def __init__(
        self,
        device: PjrtDevice,
        graph: Graph,
        main: Any,
        prologue: Any | None,
        wiring: XlaInputMap,
    ):
        super().__init__(device, graph, main, prologue, wiring)
        places = [graph.placeholders[i] for i in graph.activations]
        slots = {place: slot for slot, place in enumerate(wiring.activations)}
        self._updated = [
            _Updated(place, slots.get(place), InputConverter(places[place].meta["val"]))
            for place in wiring.updated
        ]
        self._recent: tuple[list[int], list[weakref.ref[OwnedBuffer]]] = [], []
        self._order = results_order(graph, wiring.updated)
        values = [graph.outputs[k].meta["val"] for k in self._order]
        shapes = [e.storage.dense_shape for e in map(self._exporters.__getitem__, self._order)]
        self._results = [
            jax.ShapeDtypeStruct(shape(value.shape), to_jax(value.dtype))
            for shape, value in zip(shapes, values, strict=True)
        ]

    def _bind_cpu(self, prepared: list[Any]) -> Bound:
        if not self._updated:
            return super()._bind_cpu(prepared)
        execute = _jaxlib.make_lazy_device_call(self.main, self._device.handle, self._results)
        count = len(self._updated)
        exports = [(k, self._exporters[k]) for k in self._order[count:]]
        free = self._staging

        def run(inputs: list[Tensor]) -> list[Tensor]:
            check_not_forked(self._device.pid, "XLA")
            try:  # not two calls at once with the same memory
                staging = free.pop()
            except IndexError:
                apart = [x.slot for x in self._updated if x.slot is not None]
                staging = Staging(self._device, self._activations, apart)
            tensors = [inputs[x.place] for x in self._updated]
            owners = self._owners(tensors)
            buffers = prepared + self._given(staging, inputs, tensors, owners)
            guests = [
                x.importer.to_program_order(t)
                for x, t, owner in zip(self._updated, tensors, owners, strict=True)
                if owner is None
            ]
            taken: list[Any] = []
            Launch(tensors, owners, guests, taken).run(execute(buffers))
            free.append(staging)
            outputs: list[Any] = [None] * len(self._order)
            for k, tensor in zip(self._order, tensors, strict=False):
                outputs[k] = tensor
            for (k, export), result in zip(exports, taken[0][count:], strict=True):
                if k in self._noted:
                    track_output_buffer(result)
                outputs[k] = export(from_dlpack(_jaxlib.export_dlpack(result)))
            return outputs

        return run

    def _owners(self, tensors: Sequence[Tensor]) -> list[OwnedBuffer | None]:
        """Returns where what is updated lives from now on; None: not in memory of XLA's.

        Mostly it is what it was at the last call, and lives where it did.
        """
        addresses = [t.data_ptr() for t in tensors]
        before, references = self._recent
        if before == addresses:
            owners = [reference() for reference in references]
            pairs = zip(owners, tensors, strict=True)
            if all(owner is not None and owner.is_filled_by(t) for owner, t in pairs):
                return owners
        owners = [x.owner(t, self._device) for x, t in zip(self._updated, tensors, strict=True)]
        owned = [owner for owner in owners if owner is not None]
        if len(owned) == len(owners):
            self._recent = [o.pointer for o in owned], [weakref.ref(o) for o in owned]
        return owners

    def _given(
        self,
        staging: Staging,
        inputs: Sequence[Tensor],
        tensors: Sequence[Tensor],
        owners: Sequence[OwnedBuffer | None],
    ) -> list[Any]:
        """Returns one buffer per activation of the main program."""
        buffers = list(staging.buffers)
        places, importers = self.wiring.activations, self._activations
        for k, memory in staging.small:
            memory.copy_(importers[k].to_program_order(inputs[places[k]]))
        if staging.large:
            written = {t.untyped_storage().data_ptr() for t in tensors}
        for k in staging.large:
            tensor = importers[k](inputs[places[k]])
            if tensor.untyped_storage().data_ptr() in written:  # it is read while this is written
                tensor = tensor.clone()
            buffers[k] = self._device.import_tensor(tensor)
        for x, tensor, owner in zip(self._updated, tensors, owners, strict=True):
            if x.slot is not None:
                if owner is None:
                    buffers[x.slot] = self._device.import_tensor(x.importer(tensor))
                else:
                    buffers[x.slot] = owner.buffer
        return buffers


@dataclass(frozen=True)
class _Updated:
    """An input that a program updates.

    Attributes:
        place: Its position among the activations.
        slot: Its position among the activations that the program reads; None: it does not.
        importer: Importer of it.
    """

    place: int
    slot: int | None
    importer: InputConverter

    def owner(self, tensor: Tensor, device: PjrtDevice) -> OwnedBuffer | None:
        """The memory of XLA's in which the input lives from now on; None: it stays elsewhere."""
        if self.slot is None:
            return None
        return find_owned(tensor) or move_to_xla(tensor, self.importer, device)


class Launch:
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
        """Runs the program once and stores the results in the updated tensors.

        Args:
            results: Executes it when the only element is taken, and gives its results; in C.

        Raises:
            StepCaptureError: XLA failed in the middle; what it had been given is lost.
            BaseException: Whatever stopped it, before or after the run.
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
            call_uninterrupted([*actions, partial(self._taken.extend, chain(found))])
        except BaseException as error:
            if not found:
                self._check_survival(error)
            else:
                retry_until_complete(partial(self._settle, found))
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
            retry_until_complete(partial(fill_lost_tensors, lost))
            raise StepCaptureError(
                f"XLA failed while it ran a program ({error}). {len(lost)} tensors that it was "
                "updating are lost and were filled with NaN. Load the last checkpoint, or restart."
            ) from error

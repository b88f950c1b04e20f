"""Runs whole training steps on XLA, which writes parameters and state where they are.

A donated input's memory becomes that of an output, but only if XLA owns it alone. So parameters and
state move, at their first step, into memory of XLA's (`Home`), and torch sees them there through
tensors that know the address but hold no reference that XLA could count. Their address never
changes after that, and neither side copies.
"""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends._torch_private import from_dlpack, storage_users
from dynamo_backends.aot.step.programs import StepProgram
from dynamo_backends.errors import StepCaptureError
from dynamo_backends.graph.graph import Graph
from dynamo_backends.toolkit.layouts import Exporter, Importer
from dynamo_backends.xla import _jaxlib
from dynamo_backends.xla.runtime import Device, check_process


class Home:
    """Memory of XLA's in which a tensor of torch's lives.

    Args:
        buffer: Owns the memory.
        like: A dense tensor whose shape, strides and dtype the memory is to have.

    Attributes:
        buffer: Its owner of now.
        pointer: Its address.
    """

    def __init__(self, buffer: Any, like: Tensor):
        self.buffer = buffer
        self.pointer: int = buffer.unsafe_buffer_pointer()
        self._shape, self._stride, self._dtype = like.shape, like.stride(), like.dtype

    def is_filled_by(self, tensor: Tensor) -> bool:
        """Whether a tensor at this address is all of the memory."""
        return (
            tensor.shape == self._shape
            and tensor.stride() == self._stride
            and tensor.dtype == self._dtype
        )

    def tensor(self) -> Tensor:
        """A tensor on this memory, which is valid for as long as any tensor on it exists."""
        size = self._shape.numel() * self._dtype.itemsize
        memory = (ctypes.c_char * size).from_address(self.pointer)
        memory.home = self  # type: ignore[attr-defined]
        flat = torch.frombuffer(memory, dtype=self._dtype)
        return flat.as_strided(self._shape, self._stride)


_homes: weakref.WeakValueDictionary[int, Home] = weakref.WeakValueDictionary()


def find_home(tensor: Tensor) -> Home | None:
    """The memory of XLA's that a tensor fills, if it does."""
    home = _homes.get(tensor.data_ptr())
    return home if home is not None and home.is_filled_by(tensor) else None


def move(tensor: Tensor, buffer: Any) -> None:
    """Makes a tensor live in a buffer's memory."""
    home = Home(buffer, tensor)
    _homes[home.pointer] = home
    tensor.data = home.tensor()


def is_movable(tensor: Tensor) -> bool:
    """Whether nobody else would notice if a tensor lived elsewhere: its memory is its own."""
    storage = tensor.untyped_storage()
    is_whole = storage.nbytes() == tensor.numel() * tensor.element_size()
    return tensor.numel() > 0 and is_whole and storage_users(storage) == 1


class XlaStep(StepProgram):
    """A step on the CPU.

    Args:
        device: Where it runs.
        graph: The graph.
        executable: Compiled from it; it donates the inputs that are updated.
    """

    def __init__(self, device: Device, graph: Graph, executable: Any):
        self.executable = executable
        self._device = device
        self._importers = [Importer(p.meta["val"]) for p in graph.placeholders]
        self._updated = [i for i, x in enumerate(graph.inputs) if x.updated_by is not None]
        self._exporters = [Exporter(n.meta["val"]) for n in graph.outputs[len(self._updated) :]]
        self._unfinished: _Landing | None = None

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """See `StepProgram.__call__`."""
        check_process(self._device.pid)
        if self._unfinished is not None:
            self._unfinished.settle()
        homes = [find_home(x) for x in inputs]
        buffers = [
            home.buffer if home is not None else self._import(i, inputs[i])
            for i, home in enumerate(homes)
        ]
        landing = _Landing([inputs[i] for i in self._updated], [homes[i] for i in self._updated])
        self._unfinished = landing
        landing.run(self.executable.execute, buffers)
        self._unfinished = None
        self.launches += 1
        rest = landing.results[0][len(self._updated) :]
        outputs = [from_dlpack(_jaxlib.export_dlpack(r)) for r in rest]
        return [export(t) for export, t in zip(self._exporters, outputs, strict=True)]

    def _import(self, place: int, tensor: Tensor) -> Any:
        dense = self._importers[place](tensor).detach()
        return self._device.import_tensor(dense)


class _Landing:
    """Takes the results of one run to where they belong, whatever interrupts it.

    Until a home knows the buffer that owns its memory now, nothing else may drop that buffer.

    Args:
        tensors: What is updated.
        homes: Where each lives, if in memory of XLA's.
    """

    def __init__(self, tensors: Sequence[Tensor], homes: Sequence[Home | None]):
        self._tensors = tensors
        self._homes = homes
        self.results: list[list[Any]] = []

    def run(self, execute: Callable[[list[Any]], list[Any]], buffers: list[Any]) -> None:
        """Executes the step and settles its results."""
        try:
            # Without Python code in between, so that no signal handler can lose the results.
            self.results.extend(map(execute, (buffers,)))
            self.settle()
        except BaseException as error:
            if self.results:
                self.settle()
            else:
                self._check_survival(error)
            raise

    def settle(self) -> None:
        """Lets homes own their memory again and moves or copies the rest; may be repeated."""
        if not self.results:
            return
        written = []
        for tensor, home, buffer in zip(self._tensors, self._homes, self.results[0], strict=False):
            if home is not None and buffer.unsafe_buffer_pointer() == home.pointer:
                home.buffer = buffer
                written.append(tensor)
            elif is_movable(tensor) and (home is None or home.buffer.is_deleted()):
                move(tensor, buffer)
                written.append(tensor)
            else:
                with torch.no_grad():
                    tensor.copy_(_strided(buffer, tensor))
        torch.autograd.graph.increment_version(written)

    def _check_survival(self, error: BaseException) -> None:
        """After a failed execution: memory that XLA has given up must not be read any more."""
        lost = [
            tensor
            for tensor, home in zip(self._tensors, self._homes, strict=True)
            if home is not None and home.buffer.is_deleted()
        ]
        for tensor in lost:
            tensor.data = torch.full_like(tensor, float("nan"))
        if lost:
            raise StepCaptureError(
                f"XLA failed in the middle of a step ({error}) and {len(lost)} parameters and "
                "states are lost; they are NaN now. Load the last checkpoint."
            ) from error


def _strided(buffer: Any, like: Tensor) -> Tensor:
    dense = from_dlpack(_jaxlib.export_dlpack(buffer))
    return Exporter(like)(dense)

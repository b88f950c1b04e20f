"""Runs XLA executables on torch's memory, through PJRT and DLPack."""

import contextlib
import functools
import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynamo_backends._torch_private import from_dlpack
from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.cudagraphs.device import driver
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import ALIGNMENT, InputConverter, OutputConverter
from dynamo_backends.interface.errors import DeviceError, reraise_as_compile_error
from dynamo_backends.interface.executable import Bound, Executable
from dynamo_backends.interface.forks import check_not_forked
from dynamo_backends.runtime.device_values import register_device
from dynamo_backends.runtime.foreign_devices import refuse_device_in_use
from dynamo_backends.runtime.freed_memory import return_free_memory
from dynamo_backends.runtime.staging import allocate_staging_tensors
from dynamo_backends.xla import _jaxlib, cuda, device_arrays
from dynamo_backends.xla.arrays import (
    InFlight,
    outputs_worth_tracking,
    tensor_from_numpy,
    tensor_to_numpy,
    track_output_buffer,
)
from dynamo_backends.xla.torch_prologue import TorchPrologue, equal_weights

_LOOKED_FOR = 4
"""Cache misses of prepared weights after which they are treated as changing."""


@dataclass(frozen=True)
class PjrtDevice:
    """A PJRT device, with its client and the memory that it shares with torch.

    Attributes:
        platform: "cpu", "cuda" or "tpu".
        client: Its PJRT client.
        handle: The device in the client.
        pid: The process that started the client.
        index: Which device of the platform it is.
        in_flight: What it was given, where values stay on it.
    """

    platform: str
    client: Any
    handle: Any
    pid: int
    index: int = 0
    in_flight: InFlight = field(default_factory=InFlight, compare=False, repr=False)

    @property
    def is_remote(self) -> bool:
        """Returns whether torch has no access to the device's memory."""
        return self.platform not in ("cpu", "cuda")

    @property
    def name(self) -> str:
        """Returns the device's name, such as "tpu:0"."""
        return f"{self.platform}:{self.index}"

    def upload(self, tensor: Tensor) -> Any:
        """See `Home.upload`."""
        return _jaxlib.copy_to_device(self.handle, tensor_to_numpy(tensor))

    def download(self, array: Any, flat: Tensor) -> None:
        """See `Home.download`."""
        np.copyto(tensor_to_numpy(flat), np.asarray(array).reshape(-1))

    def local_shard(self, array: Any) -> tuple[tuple[int, ...], Tensor] | None:
        """See `RemoteDevice.local_shard`."""
        return None

    def execute(self, call: Callable[[list[Any]], Any], arrays: list[Any]) -> list[Any]:
        """Runs a program that was loaded for this device; waits only if too many are on the way."""
        results: list[Any] = call(arrays)
        self.in_flight.note(results)
        return results

    def take_in(self, importers: Sequence[InputConverter], tensors: Sequence[Tensor]) -> list[Any]:
        """Buffers for a program's inputs."""
        if self.is_remote:
            return device_arrays.to_device_arrays(self, importers, tensors)
        pairs = zip(importers, tensors, strict=True)
        return self.import_tensors([check(tensor) for check, tensor in pairs])

    def shares_with(self, device: torch.device) -> bool:
        """Returns whether it computes in the memory that torch's tensors on a device have."""
        if self.platform != "cuda":
            return self.platform == device.type
        return device.type == driver().kind and (device.index or 0) == self.index

    def import_tensor(self, tensor: Tensor) -> Any:
        """A row-major tensor as a buffer; memory is shared where both sides can address it."""
        return self.import_tensors([tensor])[0]

    def import_tensors(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Row-major tensors as buffers; memory is shared where both sides can address it."""
        if self.platform == "cpu":
            here = [t if t.device.type == "cpu" else t.cpu() for t in tensors]
            return [_jaxlib.import_tensor(t, self.handle) for t in here]
        shared = [t for t in tensors if self.shares_with(t.device)]
        buffers = iter(cuda.import_tensors(shared, self.handle, self.index) if shared else ())
        return [next(buffers) if self.shares_with(t.device) else self.upload(t) for t in tensors]

    def export_buffer(self, buffer: Any, device: torch.device) -> Tensor:
        """A buffer as a tensor on `device`; memory is shared where both sides can address it."""
        if self.platform == "cpu":
            return from_dlpack(_jaxlib.export_dlpack(buffer)).to(device)
        if self.platform == "cuda" and self.shares_with(device):
            return cuda.export_buffers([buffer], self.index)[0]
        return tensor_from_numpy(np.array(buffer)).to(device)


_lock = fork_safe_lock()


def _connect(platform: str, index: int) -> PjrtDevice:
    if platform == "cpu":
        with _environment(PJRT_NPROC=str(torch.get_num_threads())):
            client = _jaxlib.make_cpu_client()
        return PjrtDevice("cpu", client, client.local_devices()[0], os.getpid())
    refuse_device_in_use(platform)
    import jax

    with _environment(XLA_PYTHON_CLIENT_PREALLOCATE="false"):
        try:
            # Of several processes that work together, this one's.
            devices = jax.local_devices(backend=platform)
        except RuntimeError as error:
            raise DeviceError(
                f"XLA finds no {platform} device here ({error}). Install the jax plugin for it, "
                f"for example: pip install 'jax[{'cuda13' if platform == 'cuda' else platform}]'"
            ) from error
    if index >= len(devices):
        raise DeviceError(
            f"XLA finds {len(devices)} {platform} devices, so there is no device number {index}"
        )
    handle = devices[index]
    return PjrtDevice(platform, handle.client, handle, os.getpid(), index)


@functools.cache
def _open(platform: str, index: int) -> PjrtDevice:
    return _connect(platform, index)


def open_device(platform: str, index: int = 0) -> PjrtDevice:
    """Returns the PJRT device of a platform; its client is started on first use.

    Args:
        platform: "cpu", "cuda" or "tpu".
        index: Which one of this process's.

    Raises:
        DeviceError: There is none, or another package runs it.
        ForkedProcessError: The client was started before this process was forked off.
    """
    with _lock:
        device = _open(platform, index)
    if device.is_remote:
        register_device(device)
    check_not_forked(device.pid, "XLA")
    return device


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Sets variables that are not set yet, for as long as a client is being started."""
    changed = {k: v for k, v in values.items() if k not in os.environ}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name in changed:
            os.environ.pop(name, None)


class Staging:
    """Holds imported CPU memory into which one call's small inputs are copied.

    Args:
        device: A CPU.
        importers: One per input of the program.
        apart: Places of inputs that are left out.

    Attributes:
        small: For each input that is copied: its place among the program's inputs, and the tensor
            to copy it to.
        large: Places of the others.
        buffers: One per input; None where `large`.
    """

    def __init__(
        self, device: PjrtDevice, importers: Sequence[InputConverter], apart: Collection[int] = ()
    ):
        self.small, self.large = allocate_staging_tensors(
            [k for k in range(len(importers)) if k not in apart],
            lambda k: (importers[k].dense_shape, importers[k].dtype),
        )
        self.buffers: list[Any] = [None] * len(importers)
        for k, memory in self.small:
            self.buffers[k] = device.import_tensor(memory)


@dataclass(frozen=True)
class XlaInputMap:
    """The positions at which a graph's inputs enter (see `prologue.SplitProgram`).

    Attributes:
        transformed: See `SplitProgram`.
        untouched: See `SplitProgram`.
        activations: See `SplitProgram`.
        updated: Positions, among the activations, of those whose new contents are the first results
            of the main program, in this order (see `updating`).
    """

    transformed: tuple[int, ...]
    untouched: tuple[int, ...]
    activations: tuple[int, ...]
    updated: tuple[int, ...] = ()


class XlaExecutable(Executable):
    """The executable of one graph on an XLA device.

    Args:
        device: Where it runs.
        graph: The graph that was compiled, for the layouts of its inputs and outputs.
        main: The loaded executable.
        prologue: What prepares the weights: instructions for torch, or an executable; None if
            nothing does.
        wiring: Which inputs go where.
    """

    serves_range = True  # of a graph of which nothing varies; see `padded` for others

    def __init__(
        self,
        device: PjrtDevice,
        graph: Graph,
        main: Any,
        prologue: Any | None,
        wiring: XlaInputMap,
    ):
        self._device = device
        self.main = main
        self.prologue = prologue
        self._binds = 0
        self.wiring = wiring
        values = [p.meta["val"] for p in graph.placeholders]
        self._weights = [InputConverter(values[i]) for i in graph.weights]
        activations = [values[i] for i in graph.activations]
        self._activations = [InputConverter(activations[i]) for i in wiring.activations]
        self._execute = _jaxlib.make_single_device_call(main, device.handle)
        self._staging: list[Staging] = []
        fakes = [n.meta["val"] for n in graph.outputs]
        self._exporters = [OutputConverter(v) for v in fakes]
        self._devices = [v.device for v in fakes]
        self._dtypes = [v.dtype for v in fakes]
        self._noted = outputs_worth_tracking(fakes)
        self._name = f"a graph of {len(graph.calls)} operators ({graph.kind})"
        ends = [activations[i] for i in wiring.activations] + fakes
        self._all_on_cpu = all(v.device.type == "cpu" for v in ends)

    @property
    def temporary_bytes(self) -> int:
        """Returns how much of the host's memory a call takes beside inputs and outputs."""
        return _jaxlib.temporary_bytes(self.main) if self._device.platform == "cpu" else 0

    def bind(self, weights: Sequence[Tensor]) -> tuple[Bound, Collection[int]]:
        """See `Executable.bind`."""
        prepared, copied = self._prepare(weights)
        if not self._binds and self.prologue is not None:
            return_free_memory()  # of intermediate results; not for weights that keep changing
        self._binds += 1
        if self._device.platform == "cpu" and self._all_on_cpu:
            return self._bind_cpu(prepared), copied
        return functools.partial(self._run, prepared), copied

    def _prepare(self, weights: Sequence[Tensor]) -> tuple[list[Any], set[int]]:
        """The main program's inputs but for activations, and which weights were copied for them."""
        check_not_forked(self._device.pid, "XLA")
        if self._device.is_remote:
            untouched = self._take_weights(weights, self.wiring.untouched)
            return untouched + self._transform(weights), set(range(len(weights)))
        ready, shared = [], set()
        for i in self.wiring.untouched:
            tensor = self._weights[i](weights[i])
            ready.append(self._import_weight(tensor))
            if self._shares(tensor, weights[i]):
                shared.add(i)
        copied = {*self.wiring.transformed, *(set(self.wiring.untouched) - shared)}
        return ready + self._transform(weights), copied

    def _transform(self, weights: Sequence[Tensor]) -> list[Any]:
        """Returns what the prologue makes of the weights."""
        if self._device.is_remote and self.prologue is not None:
            buffers = self._take_weights(weights, self.wiring.transformed)
            return self._device.execute(self.prologue.execute, buffers)
        given = [self._weights[i](weights[i]) for i in self.wiring.transformed]
        if self.prologue is None:
            return []
        if isinstance(self.prologue, TorchPrologue):
            prepared, device = self.prologue(given), self._device
            if self._binds >= _LOOKED_FOR:
                return [device.import_tensor(tensor) for tensor in prepared]
            return equal_weights.buffers(prepared, given, device.handle, device.import_tensor)
        results: list[Any] = self.prologue.execute([self._import_weight(t) for t in given])
        return results

    def _take_weights(self, weights: Sequence[Tensor], places: Sequence[int]) -> list[Any]:
        importers = [self._weights[i] for i in places]
        return self._device.take_in(importers, [weights[i] for i in places])

    def _shares(self, tensor: Tensor, weight: Tensor) -> bool:
        """Returns whether a buffer made of `tensor` is the memory of `weight`."""
        if tensor.data_ptr() != weight.data_ptr() or tensor.data_ptr() % ALIGNMENT:
            return False
        return self._device.shares_with(tensor.device)

    def _import_weight(self, tensor: Tensor) -> Any:
        # A tensor of its own, so that the buffer does not keep the caller's Parameter alive.
        return self._device.import_tensor(tensor.detach())

    def bind_for_benchmark(
        self, weights: Sequence[Tensor], activations: Sequence[Tensor]
    ) -> Callable[[], Any]:
        """XLA's own execution, for benchmarks: everything is imported beforehand, nothing exported.

        Args:
            weights: As for `bind`.
            activations: As for a bound function.
        """
        buffers = self._prepare(weights)[0]
        buffers += self._import(activations)
        return functools.partial(self._execute, buffers)

    def _import(self, activations: Sequence[Tensor]) -> list[Any]:
        given = [activations[i] for i in self.wiring.activations]
        return self._device.take_in(self._activations, given)

    def _bind_cpu(self, prepared: list[Any]) -> Bound:
        """Returns the hot path on the CPU: everything that can be decided early is."""
        execute = self._execute
        handle = self._device.handle
        pid = self._device.pid
        places, importers = self.wiring.activations, self._activations
        free = self._staging
        offset = len(prepared)
        import_tensor, export_dlpack = _jaxlib.import_tensor, _jaxlib.export_dlpack
        exporters = None if all(e.is_plain for e in self._exporters) else self._exporters
        noted = self._noted

        def run(inputs: list[Tensor]) -> list[Tensor]:
            check_not_forked(pid, "XLA")
            try:  # not two calls at once with the same memory
                staging = free.pop()
            except IndexError:
                staging = Staging(self._device, importers)
            buffers = prepared + staging.buffers
            for k, memory in staging.small:
                memory.copy_(importers[k].to_program_order(inputs[places[k]]))
            for k in staging.large:
                tensor = importers[k](inputs[places[k]])
                buffers[offset + k] = import_tensor(tensor, handle)
            results = execute(buffers)
            free.append(staging)
            for k in noted:
                track_output_buffer(results[k])
            outputs = [from_dlpack(export_dlpack(r)) for r in results]
            if exporters is None:
                return outputs
            return [export(t) for export, t in zip(exporters, outputs, strict=True)]

        return run

    def _run(self, prepared: list[Any], inputs: list[Tensor]) -> list[Tensor]:
        check_not_forked(self._device.pid, "XLA")
        device = self._device
        results = device.execute(self._execute, prepared + self._import(inputs))
        if device.is_remote:
            return device_arrays.wrap_device_outputs(
                device, self._exporters, results, self._dtypes, self._name
            )
        return [
            export(device.export_buffer(buffer, where))
            for export, buffer, where in zip(self._exporters, results, self._devices, strict=True)
        ]

    def dump(self) -> dict[str, bytes]:
        """See `Executable.dump`."""
        client = self._device.client
        wiring = {k: list(v) for k, v in vars(self.wiring).items()}
        parts = {
            "wiring": json.dumps(wiring).encode(),
            "main": _jaxlib.serialize(client, self.main),
        }
        if isinstance(self.prologue, TorchPrologue):
            parts["preparation"] = self.prologue.dump()
        elif self.prologue is not None:
            parts["prologue"] = _jaxlib.serialize(client, self.prologue)
        return_free_memory()
        return parts

    @classmethod
    def load(cls, device: PjrtDevice, graph: Graph, parts: dict[str, bytes]) -> "XlaExecutable":
        """Recreates an executable from `dump`.

        Raises:
            CompileError: The parts are incomplete, or XLA refuses them.
        """
        with reraise_as_compile_error("XLA cannot load the cached executable"):
            wiring = XlaInputMap(**{k: tuple(v) for k, v in json.loads(parts["wiring"]).items()})
            main, *prologue = [
                _jaxlib.deserialize(device.client, device.handle, parts[name])
                for name in ("main", "prologue")
                if name in parts
            ]
            if "preparation" in parts:
                prologue = [TorchPrologue.load(parts["preparation"])]
        return_free_memory()
        return cls(device, graph, main, prologue[0] if prologue else None, wiring)

"""Runs XLA executables on torch's memory, through PJRT and DLPack."""

import contextlib
import functools
import json
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynamo_backends._torch_private import from_dlpack, to_dlpack
from dynamo_backends.backend import Bound, Executable
from dynamo_backends.errors import CompileError, DeviceError, ForkedProcessError
from dynamo_backends.graph.graph import Graph
from dynamo_backends.toolkit.layouts import ALIGNMENT, Exporter, Importer
from dynamo_backends.toolkit.memory import return_free_memory
from dynamo_backends.xla import _jaxlib
from dynamo_backends.xla.arrays import from_numpy, to_numpy


@dataclass(frozen=True)
class Device:
    """A PJRT device.

    Attributes:
        platform: "cpu", "cuda" or "tpu".
        client: Its PJRT client.
        handle: The device in the client.
        pid: The process that started the client.
    """

    platform: str
    client: Any
    handle: Any
    pid: int

    def import_tensor(self, tensor: Tensor) -> Any:
        """A row-major tensor as a buffer; memory is shared where both sides can address it."""
        if self.platform == "cpu":
            return _jaxlib.import_dlpack(to_dlpack(tensor), self.handle, None)
        if self.platform == tensor.device.type:
            # XLA's stream waits for torch's current stream; the host waits for nothing.
            stream = self.handle.get_stream_for_external_ready_events()
            return _jaxlib.import_dlpack(tensor.__dlpack__(stream=stream), self.handle, stream)
        return _jaxlib.put(self.handle, to_numpy(tensor))

    def export_buffer(self, buffer: Any, device: torch.device) -> Tensor:
        """A buffer as a tensor on `device`; memory is shared where both sides can address it."""
        if self.platform == "cpu":
            return from_dlpack(_jaxlib.export_dlpack(buffer))
        if self.platform == device.type:
            stream = torch.cuda.current_stream(device).cuda_stream
            return from_dlpack(_jaxlib.export_dlpack(buffer, stream=stream))
        return from_numpy(np.array(buffer)).to(device)


_lock = threading.Lock()


@functools.cache
def _open(platform: str, index: int) -> Device:
    if platform == "cpu":
        with _environment(PJRT_NPROC=str(torch.get_num_threads())):
            client = _jaxlib.make_cpu_client()
        return Device("cpu", client, client.local_devices()[0], os.getpid())
    import jax

    with _environment(XLA_PYTHON_CLIENT_PREALLOCATE="false"):
        try:
            devices = jax.devices(platform)
        except RuntimeError as error:
            raise DeviceError(
                f"XLA has no {platform} device here ({error}). Install the jax plugin for it, for "
                f"example: pip install 'jax[{'cuda13' if platform == 'cuda' else platform}]'"
            ) from error
    if index >= len(devices):
        raise DeviceError(f"XLA sees {len(devices)} {platform} devices, not number {index}")
    handle = devices[index]
    return Device(platform, handle.client, handle, os.getpid())


def open_device(platform: str, index: int = 0) -> Device:
    """The PJRT device of a platform; its client is started on first use.

    Args:
        platform: "cpu", "cuda" or "tpu".
        index: Which one.

    Raises:
        DeviceError: There is none.
        ForkedProcessError: The client was started before this process was forked off.
    """
    with _lock:
        device = _open(platform, index)
    check_process(device.pid)
    return device


def check_process(pid: int) -> None:
    """Raises `ForkedProcessError` in a child of the process `pid`: XLA would hang there."""
    if os.getpid() != pid:
        raise ForkedProcessError(
            "XLA was started in the parent process and cannot run in a forked child; "
            "use the multiprocessing start method 'spawn'"
        )


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


@dataclass(frozen=True)
class Wiring:
    """Which inputs of a graph go where (see `prologue.SplitProgram`)."""

    transformed: tuple[int, ...]
    untouched: tuple[int, ...]
    activations: tuple[int, ...]


class XlaExecutable(Executable):
    """A compiled graph.

    Args:
        device: Where it runs.
        graph: The graph that was compiled, for the layouts of its inputs and outputs.
        main: The loaded executable.
        prologue: What prepares the weights; None if nothing does.
        wiring: Which inputs go where.
    """

    def __init__(
        self, device: Device, graph: Graph, main: Any, prologue: Any | None, wiring: Wiring
    ):
        self._device = device
        self.main = main
        self._prologue = prologue
        self._wiring = wiring
        values = [p.meta["val"] for p in graph.placeholders]
        self._weights = [Importer(values[i]) for i in graph.weights]
        activations = [values[i] for i in graph.activations]
        self._activations = [(i, Importer(activations[i])) for i in wiring.activations]
        fakes = [n.meta["val"] for n in graph.outputs]
        self._exporters = [Exporter(v) for v in fakes]
        self._devices = [v.device for v in fakes]

    def bind(self, weights: Sequence[Tensor]) -> tuple[Bound, Collection[int]]:
        """See `Executable.bind`."""
        prepared, copied = self._prepare(weights)
        if self._device.platform == "cpu":
            return self._bind_cpu(prepared), copied
        return functools.partial(self._run, prepared), copied

    def _prepare(self, weights: Sequence[Tensor]) -> tuple[list[Any], set[int]]:
        check_process(self._device.pid)
        imports, copied = {}, set(self._wiring.transformed)
        for i in {*self._wiring.transformed, *self._wiring.untouched}:
            tensor = self._weights[i](weights[i])
            shared = tensor.data_ptr() == weights[i].data_ptr()
            if self._device.platform == "cpu":
                shared = shared and tensor.data_ptr() % ALIGNMENT == 0
            else:
                shared = shared and self._device.platform == tensor.device.type
            if not shared:
                copied.add(i)
            # A tensor of its own, so that the buffer does not keep the caller's Parameter alive.
            imports[i] = self._device.import_tensor(tensor.detach())
        prepared = [imports[i] for i in self._wiring.untouched]
        if self._prologue is not None:
            prepared += self._prologue.execute([imports[i] for i in self._wiring.transformed])
        return prepared, copied

    def alone(self, weights: Sequence[Tensor], activations: Sequence[Tensor]) -> Callable[[], Any]:
        """XLA's own execution, for benchmarks: everything is imported beforehand, nothing exported.

        Args:
            weights: As for `bind`.
            activations: As for a bound function.
        """
        buffers = self._prepare(weights)[0]
        for i, check in self._activations:
            buffers.append(self._device.import_tensor(check(activations[i])))
        return functools.partial(self.main.execute, buffers)

    def _bind_cpu(self, prepared: list[Any]) -> Bound:
        """The hot path on the CPU: everything that can be decided early is."""
        execute = self.main.execute
        handle = self._device.handle
        pid = self._device.pid
        activations = self._activations
        import_dlpack, export_dlpack = _jaxlib.import_dlpack, _jaxlib.export_dlpack
        exporters = None if all(e.is_plain for e in self._exporters) else self._exporters
        getpid = os.getpid

        def run(inputs: list[Tensor]) -> list[Tensor]:
            if getpid() != pid:
                check_process(pid)
            tensors = [check(inputs[i]) for i, check in activations]
            buffers = [import_dlpack(to_dlpack(t), handle, None) for t in tensors]
            results = execute(prepared + buffers)
            outputs = [from_dlpack(export_dlpack(r)) for r in results]
            if exporters is None:
                return outputs
            return [export(t) for export, t in zip(exporters, outputs, strict=True)]

        return run

    def _run(self, prepared: list[Any], inputs: list[Tensor]) -> list[Tensor]:
        check_process(self._device.pid)
        device = self._device
        buffers = [device.import_tensor(check(inputs[i])) for i, check in self._activations]
        results = self.main.execute(prepared + buffers)
        return [
            export(device.export_buffer(buffer, where))
            for export, buffer, where in zip(self._exporters, results, self._devices, strict=True)
        ]

    def dump(self) -> dict[str, bytes]:
        """See `Executable.dump`."""
        client = self._device.client
        wiring = {k: list(v) for k, v in vars(self._wiring).items()}
        parts = {
            "wiring": json.dumps(wiring).encode(),
            "main": _jaxlib.serialize(client, self.main),
        }
        if self._prologue is not None:
            parts["prologue"] = _jaxlib.serialize(client, self._prologue)
        return_free_memory()
        return parts

    @classmethod
    def load(cls, device: Device, graph: Graph, parts: dict[str, bytes]) -> "XlaExecutable":
        """Recreates an executable from `dump`.

        Raises:
            CompileError: The parts are incomplete, or XLA refuses them.
        """
        try:
            wiring = Wiring(**{k: tuple(v) for k, v in json.loads(parts["wiring"]).items()})
            main, *prologue = [
                _jaxlib.deserialize(device.client, device.handle, parts[name])
                for name in ("main", "prologue")
                if name in parts
            ]
        except Exception as error:
            raise CompileError(f"XLA cannot load the cached executable: {error}") from error
        return cls(device, graph, main, prologue[0] if prologue else None, wiring)

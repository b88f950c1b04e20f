"""IREE's runtime: devices with torch's number of threads, and programs loaded into it."""

import ctypes
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from iree import runtime
from torch import Tensor

from dynamo_backends._torch_private import from_dlpack, to_dlpack
from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.interface.forks import check_not_forked
from dynamo_backends.iree.compiler import STACK_BYTES, disable_leak_checker, make_driver
from dynamo_backends.iree.importer import SCOPE

_CPU = 1  # DLPack's number of the device type
_lock = fork_safe_lock()


class Device:
    """A device of IREE's runtime that computes on the CPU.

    Args:
        threads: With 1 it computes in the calling thread, else it has so many of its own. They
            sleep between calls, and are not bound to processors.
    """

    def __init__(self, threads: int):
        disable_leak_checker()
        if threads == 1:
            self._driver = make_driver("local-sync")
        else:
            self._driver = make_driver(
                "local-task",
                task_topology_group_count=threads,
                task_worker_stack_size=2 * STACK_BYTES,
            )
        self.handle = self._driver.create_default_device()
        self.instance = runtime.VmInstance()
        self._pid = os.getpid()
        self.has_threads = threads > 1
        # Results live in memory of the device and may outlive the interpreter's modules.
        for immortal in (self._driver, self.handle):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(immortal))

    def check_process(self) -> None:
        """Raises `ForkedProcessError` in a forked child, if the device has threads."""
        if self.has_threads:
            check_not_forked(self._pid, "IREE")

    def wrap(self, tensor: Tensor) -> Any:
        """A row-major CPU tensor as a buffer view that shares its memory and keeps it alive."""
        try:
            return self.handle.from_dlpack_capsule(to_dlpack(tensor))
        except ValueError:  # strides of dimensions of size 1, which mean nothing
            plain = tensor.as_strided((tensor.numel(),), (1,)).view(tensor.shape)
            return self.handle.from_dlpack_capsule(to_dlpack(plain))

    def to_tensor(self, view: Any) -> Tensor:
        """Returns a buffer view as a tensor that shares its memory and keeps it alive."""
        return from_dlpack(self.handle.create_dlpack_capsule(view, _CPU, 0))


@functools.cache
def _open(threads: int, pid: int) -> Device:
    del pid
    return Device(threads)


def open_device(threads: int = 0) -> Device:
    """Returns the device of this process with so many threads.

    Args:
        threads: 0: as many as torch has now.
    """
    with _lock:
        return _open(threads or torch.get_num_threads(), os.getpid())


class Loaded:
    """A program in IREE's runtime, without its parameters.

    Args:
        program: From `compiler.compile_program`.
        device: What runs it.
    """

    def __init__(self, program: bytes, device: Device):
        self.program = program
        self.device = device
        self._module = runtime.VmModule.copy_buffer(device.instance, program)

    def start(self, parameters: Mapping[str, Tensor], name: str) -> "Started":
        """Gives the program its parameters, which runs what depends on them alone.

        Args:
            parameters: Row-major CPU tensors.
            name: Name of the function to run.
        """
        device = self.device
        modules = [runtime.create_hal_module(device.instance, device.handle), self._module]
        if parameters:
            index = runtime.ParameterIndex()
            for key, tensor in parameters.items():
                index.add_buffer(key, tensor.view(-1).view(torch.uint8).numpy())
            provider = index.create_provider(scope=SCOPE)
            modules.insert(0, runtime.create_io_parameters_module(device.instance, provider))
        context = runtime.VmContext(device.instance, modules)
        function = self._module.lookup_function(name)
        if function is None:
            raise ValueError(f"the program has no function {name!r}")
        return Started(device, context, function, tuple(parameters.values()))


class Started:
    """A function of a program that has its parameters."""

    def __init__(self, device: Device, context: Any, function: Any, kept: Sequence[Tensor]):
        self._device = device
        self._context = context
        self._function = function
        self._kept = kept  # parameters may be read where they are
        self._lock = fork_safe_lock()  # contexts run one call at a time

    def __call__(self, views: Sequence[Any], results: int) -> list[Tensor]:
        """Runs the function of the module.

        Args:
            views: Its arguments: from `Device.wrap`, and integers.
            results: How many results it has.
        """
        inputs, outputs = runtime.VmVariantList(len(views)), runtime.VmVariantList(results)
        for view in views:
            if isinstance(view, int):
                inputs.push_int(view)
            else:
                inputs.push_ref(view)
        with self._lock:
            self._context.invoke(self._function, inputs, outputs)
        get, to_tensor, kind = outputs.get_as_object, self._device.to_tensor, runtime.HalBufferView
        return [to_tensor(get(i, kind)) for i in range(results)]

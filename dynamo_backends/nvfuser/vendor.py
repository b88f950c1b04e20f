"""Collects every use of nvFuser's API, and the device on which it runs.

nvFuser has two Python front ends. `nvfuser_direct` is the one that NVIDIA develops; the older one,
`nvfuser`, is not used. None of this was run on a GPU yet. The names and signatures are those of
NVIDIA/Fuser's sources (python/python_direct/{ir,ops,runtime}.cpp and its `__init__.py`), as of
2025, versions around 0.2.28:

| what | arguments, all that are used |
|---|---|
| `FusionDefinition` | no argument; a context manager that defines |
| `fd.define_tensor` | `shape`, `contiguity`, `dtype`, `stride_order` |
| `fd.define_scalar` | a number, `dtype` |
| `fd.add_output` | a tensor |
| `fd.execute` | inputs |
| `fd.ops.size` | a tensor, a dimension |
| `fd.ops.…` | `program.Operation` of the lowerings, all positional |
| `DataType` | its members |
"""

import functools
import importlib
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.graph.graph import Graph, find_input_off_device
from dynamo_backends.interface.errors import BackendUnavailableError, DeviceError
from dynamo_backends.interface.packages import is_module_installed

MODULE = "nvfuser_direct"


@dataclass(frozen=True)
class NvFuserModule:
    """nvFuser's Python module, loaded.

    Attributes:
        module: `nvfuser_direct`.
    """

    module: Any

    def definition(self) -> Any:
        """Returns a new `FusionDefinition`."""
        return self.module.FusionDefinition()

    def dtype(self, name: str) -> Any:
        """Returns a member of `DataType`."""
        return getattr(self.module.DataType, name)

    def has(self, operation: str) -> bool:
        """Returns whether this version has an operation."""
        return operation in self._operations

    @functools.cached_property
    def _operations(self) -> frozenset[str]:
        return frozenset(dir(self.module.FusionDefinition().ops))


def is_installed() -> bool:
    """Returns whether nvFuser is installed."""
    return MODULE in sys.modules or is_module_installed(MODULE)


_loaded: dict[str, NvFuserModule] = {}


def load() -> NvFuserModule:
    """Imports nvFuser on first use.

    Raises:
        BackendUnavailableError: It is not installed, or it does not load.
    """
    if not is_installed():
        raise BackendUnavailableError(f"nvFuser is not installed; run: {remedy()}")
    if MODULE not in _loaded or _loaded[MODULE].module is not sys.modules.get(MODULE):
        try:
            _loaded[MODULE] = NvFuserModule(importlib.import_module(MODULE))
        except Exception as error:  # a library that does not fit torch fails in many ways
            raise BackendUnavailableError(
                f"{MODULE} does not load ({type(error).__name__}: {error}). Install the build for "
                f"this torch: {remedy()}"
            ) from error
    return _loaded[MODULE]


def remedy() -> str:
    """The command that installs nvFuser for this torch; its wheels are built for one torch each."""
    cuda = (torch.version.cuda or "").replace(".", "")
    major, minor = torch.__version__.split(".")[:2]
    if not cuda:
        return (
            "pip install nvfuser-cu130-torch"
            + major
            + minor
            + (", together with a CUDA build of torch")
        )
    return f"pip install nvfuser-cu{cuda}-torch{major}{minor}"


TYPE = "cuda"
"""The type of device that nvFuser compiles for."""


def is_present() -> bool:
    """Returns whether this machine has such a device and torch can use it."""
    return TYPE != "cuda" or torch.cuda.is_available()


def why_unreadable(value: Tensor) -> str | None:
    """Returns why a fusion cannot read a tensor on its device; None if it can.

    Numbers (tensors of no dimension) may be on the CPU, as in eager; they are copied to the device.
    """
    kind = value.device.type
    if kind == TYPE or (kind == "cpu" and not value.ndim):
        return None
    return f"nvFuser cannot read {kind} memory"


def require_device(graph: Graph, backend: str) -> None:
    """Raises `DeviceError` if an input that is no number is on another type of device."""
    found = find_input_off_device(graph, TYPE)
    if found is not None:
        raise DeviceError(
            f"{backend} compiles for {TYPE} devices, and an input is on {found.device.type}; "
            f"move the model and its inputs, for example by model.to({TYPE!r}), or use another "
            "backend, such as 'inductor' or 'openxla'."
        )

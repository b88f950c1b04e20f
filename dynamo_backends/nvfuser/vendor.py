"""What this package uses of nvFuser, in one place, and of which of its two frontends.

nvFuser comes with two Python frontends that define fusions in nearly the same words: `nvfuser`, the
older, and `nvfuser_direct`, which will take its place. A process can load one of them only.

None of this was run on a GPU yet. The names and signatures are those of NVIDIA/Fuser's sources
(python/python_frontend/python_bindings.cpp, python/python_direct/{ir,ops,runtime}.cpp and the two
`__init__.py`), as of 2025, versions around 0.2.28:

| what | arguments, all that are used |
|---|---|
| `FusionDefinition` | `max_length` (of `nvfuser` only); a context manager that defines |
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

from dynamo_backends.interface.errors import BackendUnavailableError
from dynamo_backends.interface.packages import is_there

FRONTENDS = ("nvfuser_direct", "nvfuser")
"""The preferred one first."""

_MAX_LENGTH = 1024  # nvfuser's own default; longer definitions have to say so
_RECORDS_PER_STEP = 8


@dataclass(frozen=True)
class Frontend:
    """One of nvFuser's frontends, loaded.

    Attributes:
        name: Of its module.
        module: It.
    """

    name: str
    module: Any

    def definition(self, steps: int) -> Any:
        """A new `FusionDefinition` for so many operations."""
        if self.name == "nvfuser":
            length = max(_MAX_LENGTH, _RECORDS_PER_STEP * steps)
            return self.module.FusionDefinition(max_length=length)
        return self.module.FusionDefinition()

    def dtype(self, name: str) -> Any:
        """A member of `DataType`."""
        return getattr(self.module.DataType, name)

    def has(self, operation: str) -> bool:
        """Whether this version has an operation."""
        return operation in self._operations

    @functools.cached_property
    def _operations(self) -> frozenset[str]:
        return frozenset(dir(self.module.FusionDefinition().ops))


def installed() -> list[str]:
    """The frontends that are installed, the preferred one first.

    One that is loaded already is the only one that can be used.
    """
    loaded = [name for name in FRONTENDS if name in sys.modules]
    return loaded[:1] or [name for name in FRONTENDS if is_there(name)]


_opened: dict[str, Frontend] = {}


def open_frontend(name: str) -> Frontend:
    """Loads a frontend.

    Args:
        name: "nvfuser" or "nvfuser_direct"; "auto" is the preferred one.

    Raises:
        BackendUnavailableError: It is not installed, the other one is loaded, or it does not load.
    """
    usable = installed()
    if name == "auto" and usable:
        name = usable[0]
    if name not in usable:
        raise BackendUnavailableError(_why_not(name, usable))
    if name not in _opened or _opened[name].module is not sys.modules.get(name):
        try:
            _opened[name] = Frontend(name, importlib.import_module(name))
        except Exception as error:  # a library that does not fit torch fails in many ways
            raise BackendUnavailableError(
                f"{name} does not load ({type(error).__name__}: {error}). Install the build for "
                f"this torch: {remedy()}"
            ) from error
    return _opened[name]


def _why_not(name: str, usable: list[str]) -> str:
    if usable and usable[0] in sys.modules:
        return (
            f"{name} was asked for, but {usable[0]} is loaded and a process can load one of them "
            f"only; leave the option 'frontend' at 'auto', or do not import {usable[0]}."
        )
    what = "nvFuser" if name == "auto" else name
    return f"{what} is not installed; run: {remedy()}"


def remedy() -> str:
    """The command that installs nvFuser for this torch; its wheels are built for one torch each."""
    cuda = (torch.version.cuda or "").replace(".", "")
    major, minor = torch.__version__.split(".")[:2]
    if not cuda:
        return "pip install nvfuser-cu130-torch" + major + minor + ", beside a CUDA build of torch"
    return f"pip install nvfuser-cu{cuda}-torch{major}{minor}"

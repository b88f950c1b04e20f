"""A double of nvFuser that computes on the CPU, for tests on machines without a GPU.

`install(name)` makes one of its two frontends importable, as far as this package calls it. Fusions
are interpreted with torch. Whatever is passed is checked, more strictly than nvFuser does where it
would promote types or broadcast on its own, so that nothing is left to rules which cannot be tried
here.

Sources: NVIDIA/Fuser, python/python_direct/{ir,ops,runtime}.cpp, python/python_frontend/
python_bindings.cpp, python/python_common/python_utils.cpp, csrc/ops/alias.cpp and the two
`__init__.py`.
"""

import contextlib
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from dynamo_backends.nvfuser import devices, vendor
from dynamo_backends.nvfuser.definition import FUSIONS
from tests.nvfuser.double import direct, legacy
from tests.nvfuser.double.types import FusionError, make_data_type

__all__ = ["FusionError", "installed", "module"]

_MODULES = {"nvfuser_direct": direct.FusionDefinition, "nvfuser": legacy.FusionDefinition}


def module(name: str) -> ModuleType:
    """A module that stands for a frontend."""
    made: Any = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    made.DataType = make_data_type(name)
    base = _MODULES[name]
    made.FusionDefinition = type("FusionDefinition", (base,), {"data_type": made.DataType})
    return made


@contextlib.contextmanager
def installed(name: str) -> Iterator[ModuleType]:
    """A frontend can be imported, and tensors on the CPU count as on its device."""
    before = {n: sys.modules.pop(n, None) for n in vendor.FRONTENDS}
    kind, devices.TYPE = devices.TYPE, "cpu"
    sys.modules[name] = module(name)
    FUSIONS.clear()
    try:
        yield sys.modules[name]
    finally:
        FUSIONS.clear()
        devices.TYPE = kind
        sys.modules.pop(name)
        sys.modules.update({n: m for n, m in before.items() if m is not None})

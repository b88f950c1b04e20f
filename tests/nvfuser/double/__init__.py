"""A double of nvFuser that computes on the CPU, for tests on machines without a GPU.

`installed()` makes `nvfuser_direct` importable, as far as this package calls it. Fusions are
interpreted with torch. Whatever is passed is checked, more strictly than nvFuser does where it
would promote types or broadcast on its own, so that nothing is left to rules which cannot be tried
here.

Sources: NVIDIA/Fuser, python/python_direct/{ir,ops,runtime}.cpp,
python/python_common/python_utils.cpp, csrc/ops/alias.cpp and `__init__.py`.
"""

import contextlib
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from dynamo_backends.nvfuser import vendor
from dynamo_backends.nvfuser.program import FUSIONS
from tests.nvfuser.double import direct
from tests.nvfuser.double.types import DataType, FusionError

__all__ = ["FusionError", "installed", "module"]


def module() -> ModuleType:
    """A module that stands for `nvfuser_direct`."""
    made: Any = ModuleType(vendor.MODULE)
    made.__spec__ = ModuleSpec(vendor.MODULE, None)
    made.DataType = DataType
    made.FusionDefinition = direct.FusionDefinition
    return made


@contextlib.contextmanager
def installed() -> Iterator[ModuleType]:
    """nvFuser can be imported, and tensors on the CPU count as on its device."""
    before = sys.modules.pop(vendor.MODULE, None)
    kind, vendor.TYPE = vendor.TYPE, "cpu"
    sys.modules[vendor.MODULE] = module()
    FUSIONS.clear()
    try:
        yield sys.modules[vendor.MODULE]
    finally:
        FUSIONS.clear()
        vendor.TYPE = kind
        sys.modules.pop(vendor.MODULE)
        if before is not None:
            sys.modules[vendor.MODULE] = before

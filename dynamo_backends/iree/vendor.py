"""What this package uses of IREE beyond what IREE documents, in one place.

| what | checked |
|---|---|
| `iree.compiler.extras.fx_importer.FxImporter.import_stateless_graph` | 3.13 run |
| `iree.compiler.ir`: `Operation`, `Block.erase_argument` | 3.13 run |
| `iree.compiler.tools.binaries.find_tool` | 3.13 run |
| `iree.runtime._binding`: `create_hal_driver`, `parse_flags`, `disable_leak_checker` | 3.13 run |
| `HalDevice.from_dlpack_capsule`, `create_dlpack_capsule` | 3.13 run |
"""

import functools
from typing import Any


def make_importer() -> Any:
    """Returns a new importer of FX graphs, with an MLIR module and context of its own."""
    from iree.compiler.extras.fx_importer import FxImporter

    return FxImporter()


def mlir() -> Any:
    """IREE's Python bindings of MLIR."""
    from iree.compiler import ir

    return ir


@functools.cache
def compiler_path() -> str:
    """Returns where the program `iree-compile` is."""
    from iree.compiler.tools import binaries

    path: str = binaries.find_tool("iree-compile")
    return path


_DEFAULTS = {"task_topology_group_count": 0, "task_worker_stack_size": 131072}


def make_driver(name: str, **flags: int) -> Any:
    """Returns a driver of IREE's runtime.

    Args:
        name: "local-sync" or "local-task".
        flags: Of IREE's, which drivers read when they are made; they get their defaults again.
    """
    from iree.runtime import _binding

    _binding.parse_flags(*[f"--{flag}={value}" for flag, value in flags.items()])
    try:
        return _binding.create_hal_driver(name)
    finally:
        _binding.parse_flags(*[f"--{flag}={_DEFAULTS[flag]}" for flag in flags])


def expect_immortal_objects() -> None:
    """Keeps IREE's bindings from listing objects that are alive when the process ends."""
    from iree.runtime import _binding

    _binding.disable_leak_checker()

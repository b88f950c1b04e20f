"""Loads the programs outside the package as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def load(path: str) -> ModuleType:
    """The module of a program, such as "examples/demo.py", without running it."""
    name = "program_" + path.removesuffix(".py").replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str((ROOT / path).parent)
    sys.path.insert(0, folder)  # as for a program that is run
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
    return module

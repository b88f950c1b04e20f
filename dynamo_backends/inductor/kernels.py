"""Kernels in C++ beside the modules that call them."""

import ctypes
import logging
from pathlib import Path
from typing import Any

from torch import Tensor

from dynamo_backends import _torch_private as private
from dynamo_backends.bench.runner import brief_error

log = logging.getLogger("dynamo_backends")


def load_kernel(module: str, **inserted: str) -> Any | None:
    """The compiled C++ file beside a module; None, with a warning, if it cannot be compiled.

    Args:
        module: The `__file__` of a module; the other file has the suffix ".cpp".
        inserted: What stands in the source for "@name@".

    Returns:
        A `ctypes.CDLL`.
    """
    path = Path(module).with_suffix(".cpp")
    source = path.read_text(encoding="utf-8")
    for name, text in inserted.items():
        source = source.replace(f"@{name}@", text)
    try:
        return private.load_cpp(source)
    except Exception as error:
        log.warning("Inductor's own kernels are used, %s failed: %s", path.name, brief_error(error))
        return None


def pointers(*tensors: Tensor | None) -> list[ctypes.c_void_p | None]:
    """Where the memory of tensors begins, as arguments of a kernel; the tensors must stay alive."""
    return [None if t is None else ctypes.c_void_p(t.data_ptr()) for t in tensors]

"""Kernels in C++ beside the modules that call them."""

import ctypes
import logging
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dynamo_backends import _torch_private as private
from dynamo_backends.bench.runner import brief_error

log = logging.getLogger("dynamo_backends")

_workspaces = threading.local()


def load_kernel(module: str, **inserted: str) -> Any | None:
    """The compiled C++ file beside a module; None, with a warning, if it cannot be compiled.

    Args:
        module: The `__file__` of a module; the other file has the suffix ".cpp".
        inserted: What stands in the source for "@name@"; "@MICROKERNEL@" is `microkernel.h`.

    Returns:
        A `ctypes.CDLL`.
    """
    path = Path(module).with_suffix(".cpp")
    source = path.read_text(encoding="utf-8")
    microkernel = path.with_name("microkernel.h").read_text(encoding="utf-8")
    for name, text in {"MICROKERNEL": microkernel, **inserted}.items():
        source = source.replace(f"@{name}@", text)
    try:
        return private.load_cpp(source)
    except Exception as error:
        log.warning("Inductor's own kernels are used, %s failed: %s", path.name, brief_error(error))
        return None


def pointers(*tensors: Tensor | None) -> list[ctypes.c_void_p | None]:
    """Where the memory of tensors begins, as arguments of a kernel; the tensors must stay alive."""
    return [None if t is None else ctypes.c_void_p(t.data_ptr()) for t in tensors]


def workspace(elements: int) -> Tensor:
    """Memory for what lies between input and result, the same for all calls of a thread.

    Args:
        elements: In float32, at least.
    """
    known: Tensor | None = getattr(_workspaces, "memory", None)
    if known is None or known.numel() < elements:
        known = _workspaces.memory = torch.empty(elements)
    return known

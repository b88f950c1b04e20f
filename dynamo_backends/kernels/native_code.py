"""Kernels in C++ beside the modules that call them."""

import ctypes
import functools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dynamo_backends import _torch_private as private
from dynamo_backends._torch_private.forks import fork_safe_rlock
from dynamo_backends.interface.errors import brief_error

log = logging.getLogger("dynamo_backends")

KINDS = {torch.float32: "Float", torch.bfloat16: "BFloat16"}
"""Types of images and weights, as numbers.h calls them."""
_HEADER = "numbers.h"
_workspaces = threading.local()


def once(function: Callable[..., Any]) -> Any:
    """Caches a function like `functools.cache`, running it once across threads."""
    lock = fork_safe_rlock()
    cached = functools.cache(function)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with lock:
            return cached(*args)

    call.cache_clear = cached.cache_clear  # type: ignore[attr-defined]
    return call


def load_kernel(module: str, **inserted: str) -> Any | None:
    """The compiled C++ file beside a module; None, with a warning, if it cannot be compiled.

    It may include numbers.h, which stands there too.

    Args:
        module: The `__file__` of a module; the other file has the suffix ".cpp".
        inserted: What stands in the source for "@name@".

    Returns:
        A `ctypes.CDLL`.
    """
    path = Path(module).with_suffix(".cpp")
    source = path.read_text(encoding="utf-8")
    header = path.with_name(_HEADER).read_text(encoding="utf-8")
    source = source.replace(f'#include "{_HEADER}"', header)
    for name, text in inserted.items():
        source = source.replace(f"@{name}@", text)
    try:
        return private.load_cpp(source)
    except Exception as error:
        log.warning(
            "custom CPU kernels are not used, because "
            "compiling %s failed; Inductor's kernels are "
            "used instead: %s",
            path.name,
            brief_error(error),
        )
        return None


@dataclass(frozen=True)
class KernelCall:
    """Holds the function and arguments of one call of a convolution kernel.

    Attributes:
        function: Of a library. Its last arguments are the result, a workspace, and the sizes.
        sizes: Sizes of the call.
        shape: Shape of the result.
        words: Words of the workspace.
    """

    function: Any
    sizes: ctypes.Structure
    shape: tuple[int, ...]
    words: int

    def __call__(self, dtype: torch.dtype, *inputs: Tensor | None) -> Tensor:
        """Returns the result, channels last, in some type."""
        result = torch.empty(self.shape, dtype=dtype, memory_format=torch.channels_last)
        given = pointers(*inputs, result, _workspace(self.words))
        self.function(*given, ctypes.byref(self.sizes))
        return result


def pointers(*tensors: Tensor | None) -> list[ctypes.c_void_p | None]:
    """Returns the addresses of tensors as arguments of a kernel; the tensors must stay alive."""
    return [None if t is None else ctypes.c_void_p(t.data_ptr()) for t in tensors]


def elements_per_word(dtype: torch.dtype) -> int:
    """Returns how many elements of a dtype fit in a 32-bit word."""
    return 4 // dtype.itemsize


def _workspace(words: int) -> Tensor:
    """Memory for a kernel, the same for all calls of a thread."""
    known: Tensor | None = getattr(_workspaces, "memory", None)
    if known is None or known.numel() < words:
        known = _workspaces.memory = torch.empty(words)
    return known

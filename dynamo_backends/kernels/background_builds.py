"""Kernels in C++ are compiled beside capture: a compiler needs no Python, and capture nothing else.

Which kernels a network will need is guessed from the shapes of its weights. A wrong guess takes the
time of another processor, and what is missing is compiled when it is needed.
"""

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from dynamo_backends import _torch_private as private
from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.kernels import skinny_gemm, small_channels, winograd

Library = tuple[Callable[..., Any], tuple[Any, ...]]
"""What compiles a library, and its arguments."""

_started: dict[Library, threading.Thread] = {}
_lock = fork_safe_lock()


def start(inputs: Iterable[Any]) -> None:
    """Begins to compile the kernels that a captured graph will need, and returns at once.

    Args:
        inputs: Of the graph; weights among them. For tensors on other devices, and for a graph that
            is differentiated, nothing is compiled.
    """
    tensors = [x for x in inputs if isinstance(x, Tensor) and _is_static_on_cpu(x)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return
    with _lock:
        new = [library for library in needed_kernels(tensors) if library not in _started]
        if new:
            private.import_inductor()
        for library in new:
            thread = threading.Thread(target=_compile, args=(library,), daemon=True)
            _started[library] = thread
            thread.start()


def finish() -> None:
    """Waits for the background compilations, which would disturb timing."""
    with _lock:
        threads = list(_started.values())
    for thread in threads:
        thread.join()


def _is_static_on_cpu(x: Tensor) -> bool:
    """Looking at a symbolic size would guard it."""
    return x.device.type == "cpu" and all(type(n) is int for n in x.shape)


def needed_kernels(tensors: Iterable[Tensor]) -> Collection[Library]:
    """Returns what compiles the kernels that may suit networks with such weights."""
    found: dict[Library, None] = {}
    for weight in tensors:
        for module in (small_channels, winograd, skinny_gemm):
            library = module.library_for(weight)
            if library is not None:
                found[library] = None
    return found.keys()


def _compile(library: Library) -> None:
    compile_library, arguments = library
    with contextlib.suppress(Exception):  # it is compiled again, and says so, when it is needed
        compile_library(*arguments)

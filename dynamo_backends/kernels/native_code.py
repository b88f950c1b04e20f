"""C++ kernels beside the modules that call them, and races that choose among kernels."""

import ctypes
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dynamo_backends import _torch_private as private
from dynamo_backends._torch_private.forks import fork_safe_rlock
from dynamo_backends.interface.counters import RACES, stage
from dynamo_backends.interface.errors import brief_error
from dynamo_backends.runtime.cache import DiskCache, cache_folder, source_digest
from dynamo_backends.runtime.processor import processor, processor_name
from dynamo_backends.workers.choices import Choices
from dynamo_backends.workers.race import Measured, Race, Run

log = logging.getLogger("dynamo_backends")

KINDS = {torch.float32: "Float", torch.bfloat16: "BFloat16"}
"""Types of images and weights, as numbers.h calls them."""
_HEADER = "numbers.h"
_workspaces = threading.local()


def once(function: Callable[..., Any]) -> Any:
    """`functools.cache` of a function that runs once, whichever threads call it."""
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
        log.warning("Inductor's own kernels are used, %s failed: %s", path.name, brief_error(error))
        return None


@dataclass(frozen=True)
class Plan:
    """How a kernel of convolutions is called.

    Attributes:
        function: Of a library. Its last arguments are the result, a workspace, and the sizes.
        sizes: Of the call.
        shape: Of the result.
        words: Of the workspace.
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
    """Where the memory of tensors begins, as arguments of a kernel; the tensors must stay alive."""
    return [None if t is None else ctypes.c_void_p(t.data_ptr()) for t in tensors]


def in_word(dtype: torch.dtype) -> int:
    """Returns how many numbers a word of 32 bits has, in which kernels read images and weights."""
    return 4 // dtype.itemsize


def _workspace(words: int) -> Tensor:
    """Memory for a kernel, the same for all calls of a thread."""
    known: Tensor | None = getattr(_workspaces, "memory", None)
    if known is None or known.numel() < words:
        known = _workspaces.memory = torch.empty(words)
    return known


FOLDER = "choices"
"""In the cache folder."""

_BUDGET_S = 0.2  # for each kind
_PATIENCE = 3  # budgets, where others disturb a race on one thread, too
_LIMIT = 16 << 20  # bytes on disk
_NATIVE = ("numbers.h", "skinny_gemm.cpp", "small_channels.cpp", "winograd.cpp")
_SOURCES = ("kernels", *(f"kernels/{name}" for name in _NATIVE))

Layout = tuple[Sequence[int], Sequence[int], torch.dtype]
"""Shape, strides and data type of a tensor."""


def fastest(
    kind: str,
    usual: str,
    make: Callable[[], Mapping[str, Run]],
    layouts: Sequence[Layout],
    preferred: str | None = None,
    safe: str | None = None,
) -> str:
    """Name of the fastest way to compute something.

    Equal kinds give equal choices while a graph is compiled. Where torch is told to be
    deterministic nothing is measured, and it is the usual one.

    Args:
        kind: What tells calls apart for which the choice may differ, besides layouts and threads.
        usual: Name of the usual way.
        make: Gives all ways by name, each a function of a list of tensors.
        layouts: Of these tensors.
        preferred: Name of the way to be taken if no other one is faster; by default the usual one.
        safe: Name of the way that is the fastest most often, to be taken where others disturb the
            race; by default the preferred one.
    """
    if torch.are_deterministic_algorithms_enabled():
        return usual
    preferred = preferred or usual
    classes = [_class_of(layout) for layout in layouts]
    key = f"{kind} {classes} {torch.get_num_threads()}"

    def race() -> Measured:
        with stage(RACES), private.disable_current_modes(), torch.no_grad():
            return _race(preferred, make(), layouts)

    return choices(key, safe or preferred, preferred, race).way


def _class_of(layout: Layout) -> tuple[list[int], list[int], torch.dtype]:
    """A layout with the power of two in place of the first dimension, and dense strides' order."""
    (first, *rest), strides, dtype = layout
    order = sorted(range(len(strides)), key=lambda d: -strides[d])
    return [1 << (int(first) - 1).bit_length(), *map(int, rest)], order, dtype


def _race(preferred: str, runs: Mapping[str, Run], layouts: Sequence[Layout]) -> Measured:
    """A race on all threads; if others disturb it so that it decides nothing, one on one thread.

    Others leave a processor to that. Its outcome decides as that of a disturbed race does: only
    for now.
    """
    together = _race_on_threads(preferred, runs, layouts)
    if torch.get_num_threads() == 1 or together.decides:
        return together
    with _one_thread():
        alone = _race_on_threads(preferred, runs, layouts, _PATIENCE)
    contention = replace(together.contention, scattered=alone.contention.scattered)
    return replace(alone, contention=contention, clear=alone.sure)


def _race_on_threads(
    preferred: str, runs: Mapping[str, Run], layouts: Sequence[Layout], patience: float = 1
) -> Measured:
    def inputs() -> list[Tensor]:
        return [
            torch.empty_strided(shape, strides, dtype=dtype).fill_(1.0)
            for shape, strides, dtype in layouts
        ]

    race = Race(
        dict(runs),
        inputs,
        sets=2,
        pauses=False,
        budget_s=_BUDGET_S,
        patience=patience,
        brief=True,
    )
    return race.run(preferred)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _store() -> DiskCache:
    return DiskCache(cache_folder() / FOLDER, _LIMIT, what="choices among kernels")


def _holds_for() -> str:
    sources = source_digest(*_SOURCES)
    return f"{sources} {torch.__version__} {processor()} {processor_name()}"


choices = Choices(_store, _holds_for)
"""Those of this process."""

"""Choices that depend on the processor: raced once for each kind of call, and kept on disk.

Kinds are classes of shapes: of the first dimension, which is the batch or the rows, only the power
of two counts that it does not exceed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from dynamo_backends import _torch_private as private
from dynamo_backends.interface.counters import RACES, time_stage
from dynamo_backends.runtime.cache import DiskCache, cache_folder, source_digest
from dynamo_backends.runtime.cpu_info import cpu_cache_key, cpu_name
from dynamo_backends.workers.kernel_choices import Choices
from dynamo_backends.workers.race import Race, RaceResult, Run

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
    """Times the ways to compute something; returns the fastest one's name.

    Equal kinds give equal choices while a graph is compiled. Where torch is told to be
    deterministic nothing is measured, and it is the usual one.

    Args:
        kind: What tells calls apart for which the choice may differ, besides layouts and threads.
        usual: Name of the usual way.
        make: Gives all ways by name, each a function of a list of tensors.
        layouts: Layouts of these tensors.
        preferred: Name of the way to be taken if no other one is faster; by default the usual one.
        safe: Name of the way that is the fastest most often, to be taken where others disturb the
            race; by default the preferred one.
    """
    if torch.are_deterministic_algorithms_enabled():
        return usual
    preferred = preferred or usual
    classes = [_class_of(layout) for layout in layouts]
    key = f"{kind} {classes} {torch.get_num_threads()}"

    def race() -> RaceResult:
        with time_stage(RACES), private.disable_current_modes(), torch.no_grad():
            return _race(preferred, make(), layouts)

    return choices(key, safe or preferred, preferred, race).way


def _class_of(layout: Layout) -> tuple[list[int], list[int], torch.dtype]:
    """A layout with the power of two in place of the first dimension, and dense strides' order."""
    (first, *rest), strides, dtype = layout
    order = sorted(range(len(strides)), key=lambda d: -strides[d])
    return [1 << (int(first) - 1).bit_length(), *map(int, rest)], order, dtype


def _race(preferred: str, runs: Mapping[str, Run], layouts: Sequence[Layout]) -> RaceResult:
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
) -> RaceResult:
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
    return f"{sources} {torch.__version__} {cpu_cache_key()} {cpu_name()}"


choices = Choices(_store, _holds_for)
"""Those of this process."""

"""Choices that depend on the processor: measured, once for each kind of call in a process."""

import threading
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from dynamo_backends import _torch_private as private
from dynamo_backends.tuning.race import Race, Run

_BUDGET_S = 0.2  # for each kind
_known: dict[str, str] = {}
_lock = threading.Lock()

Layout = tuple[Sequence[int], Sequence[int], torch.dtype]
"""Shape, strides and data type of a tensor."""


def fastest(
    kind: str,
    usual: str,
    make: Callable[[], Mapping[str, Run]],
    layouts: Sequence[Layout],
    preferred: str | None = None,
) -> str:
    """Name of the fastest way to compute something.

    Equal kinds give equal choices as long as the process lives. Where torch is told to be
    deterministic nothing is measured, and it is the usual one.

    Args:
        kind: What tells calls apart for which the choice may differ, besides layouts and threads.
        usual: Name of the usual way.
        make: Gives all ways by name, each a function of a list of tensors.
        layouts: Of these tensors.
        preferred: Name of the way to be taken if no other one is faster; by default the usual one.
    """
    if torch.are_deterministic_algorithms_enabled():
        return usual
    key = f"{kind} {layouts} {torch.get_num_threads()}"
    with _lock:
        if key not in _known:
            with private.disable_current_modes(), torch.no_grad():
                _known[key] = _race(preferred or usual, make(), layouts)
        return _known[key]


def _race(preferred: str, runs: Mapping[str, Run], layouts: Sequence[Layout]) -> str:
    def inputs() -> list[Tensor]:
        return [
            torch.empty_strided(shape, strides, dtype=dtype).fill_(1.0)
            for shape, strides, dtype in layouts
        ]

    measured = Race(dict(runs), inputs, sets=2, pauses=False, budget_s=_BUDGET_S).run(preferred)
    return preferred if preferred in measured.equal else measured.order[0]

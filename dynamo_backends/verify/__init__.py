"""Compares compiled code with eager, and handles wrong results.

`comparator` says whether results are right, `reference` computes what they should be, `first`
compares the first call of a compiled block, `trials` has single calls tried, and `bisection` finds
the operators that are wrong.
"""

from typing import Any

from dynamo_backends.interface.deprecated_names import warn_of_old_name
from dynamo_backends.verify.comparator import describe_difference
from dynamo_backends.verify.reference import (
    module_in_float64,
    restore_rng,
    snapshot_rng,
    widen_to_float64,
)

__all__ = [
    "describe_difference",
    "module_in_float64",
    "restore_rng",
    "snapshot_rng",
    "widen_to_float64",
]

_RENAMED = {
    "difference": "describe_difference",
    "in_float64": "module_in_float64",
    "widen": "widen_to_float64",
}


def __getattr__(name: str) -> Any:
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn_of_old_name(f"{__name__}.{name}", _RENAMED[name])
    return globals()[_RENAMED[name]]

"""Compares compiled code with eager, and handles wrong results.

`comparator` says whether results are right, `reference` computes what they should be, `first`
compares the first call of a compiled block, `trials` has single calls tried, and `bisection` finds
the operators that are wrong.
"""

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

"""Whether compiled code computes what eager does, and what happens if it does not.

`rule` says when results are right, `replay` computes what they should be, `first` compares the
first call of a compiled block, `steps` that of a whole training step, and `bisection` finds the
operators that are wrong.
"""

from dynamo_backends.verify.precise import in_float64, widen
from dynamo_backends.verify.rng import restore_rng, snapshot_rng
from dynamo_backends.verify.rule import difference

__all__ = ["difference", "in_float64", "restore_rng", "snapshot_rng", "widen"]

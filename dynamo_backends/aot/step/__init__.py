"""Whole training steps as one graph: forward, backward and update.

In the order of a call: `state` has what lives from step to step, `record` runs the user's function
and compares its torch calls with a record, `backward` runs backward passes with user code in them,
`program` makes a compiled program of a record, and `mesh` spreads it over devices. See
docs/architecture.md.
"""

from dynamo_backends.aot.step.api import compile_step
from dynamo_backends.aot.step.step import Step

__all__ = ["Step", "compile_step"]

"""Whole training steps as one graph: forward, backward and update.

In the order of the data: `inventory` finds what lives from step to step, `replay` runs the user's
function and compares its torch calls with a record, `capture` traces the calls of a record on
tensors without data, `functional` takes the writes out of the graph, `backends` compiles it,
`variant` runs it as long as its `guards` hold, and `api` puts all of this behind one call.
"""

from dynamo_backends.aot.step.api import compile_step
from dynamo_backends.aot.step.step import Step

__all__ = ["Step", "compile_step"]

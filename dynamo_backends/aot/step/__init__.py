"""Whole training steps as one graph: forward, backward and update.

In the order of the data: `inventory` finds what lives from step to step, `capture` runs the user's
function on tensors without data and records it, `functional` takes the writes out of the recording,
`backends` compiles the graph, `variant` runs it as long as its `guards` hold, `step` has the
variants, and `api` puts all of this behind one call.
"""

from dynamo_backends.aot.step.api import compile_step
from dynamo_backends.aot.step.replay.step import Step

__all__ = ["Step", "compile_step"]

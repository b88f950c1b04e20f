"""Describes what is captured of a training step, and what of it is recorded."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from dynamo_backends.aot.step.mesh.parallel import Parallel
from dynamo_backends.aot.step.program.scalars import ScalarGuard
from dynamo_backends.aot.step.state.aliases import Aliases
from dynamo_backends.graph.graph import Role

WHAT_TO_DO = 'Pass fallback="split" to run in eager the parts that cannot be compiled.'


@dataclass(frozen=True)
class Definition:
    """The function, models and optimizers that a step captures.

    Attributes:
        function: The user's step function.
        models: Whose parameters and buffers it uses.
        optimizers: That it steps.
        accumulate: In how many parts it takes a batch.
        parallel: How it is spread over a mesh; None: it is not.
    """

    function: Callable[..., Any]
    models: tuple[nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    accumulate: int = 1
    parallel: Parallel | None = None


@dataclass(frozen=True)
class Recording:
    """A step as a graph that still writes to its inputs.

    Attributes:
        module: The graph. Inputs: numbers, slots, gradients, batch.
        fakes: One per input.
        roles: One per input.
        names: One per input.
        results: Output of each tensor that the calls return.
        entering: Slots that have gradients at the start.
        gradient_slots: Those of them whose gradients are inputs.
        leaves: Slots that may have gradients.
        gradients: Output and slot of each gradient that is left when the step ends.
        batch_gradients: The same for tensors of the batch: output and position.
        cleared: Slots whose gradient the step takes away.
        answers: What an optimizer was told about numbers.
        living: Slots whose values the terms of these answers have after the numbers.
        batch_with_gradient: Positions of tensors of the batch whose gradients are inputs.
        aliases: Memory that several slots share; it is the last inputs.
    """

    module: fx.GraphModule
    fakes: tuple[Tensor, ...]
    roles: tuple[Role, ...]
    names: tuple[str, ...]
    results: tuple[int, ...]
    entering: tuple[int, ...]
    gradient_slots: tuple[int, ...]
    leaves: tuple[int, ...]
    gradients: tuple[tuple[int, int], ...]
    batch_gradients: tuple[tuple[int, int], ...]
    cleared: tuple[int, ...]
    answers: tuple[ScalarGuard, ...]
    living: tuple[int, ...]
    batch_with_gradient: tuple[int, ...]
    aliases: Aliases

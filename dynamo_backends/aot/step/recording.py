"""What is captured of a training step, and what of it is recorded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from dynamo_backends.aot.step.aliases import Aliases
from dynamo_backends.aot.step.hyperparameters import group_numbers, read_number
from dynamo_backends.aot.step.mesh.parallel import Parallel
from dynamo_backends.aot.step.python_state.effects import Effect
from dynamo_backends.aot.step.python_state.following import Conditions
from dynamo_backends.aot.step.python_state.places import Place
from dynamo_backends.aot.step.recomputed import Recomputed
from dynamo_backends.aot.step.scalars import Answer
from dynamo_backends.graph.roles import Role

WHAT_TO_DO = (
    'Change the function so that it is one graph, or pass fallback="split" to compile the parts of '
    "it with torch.compile."
)


@dataclass(frozen=True)
class Definition:
    """What is to be captured.

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
class Result:
    """Where one leaf of the function's result comes from.

    Attributes:
        kind: "output" of the graph, "slot" (a tensor that lives on), "term" or "constant".
        value: Position of the output or slot, the term, or the constant.
    """

    kind: str
    value: Any


@dataclass(frozen=True)
class Recording:
    """A step as a graph that still writes to its inputs.

    Attributes:
        module: The graph. Inputs: numbers, slots, gradients, batch.
        fakes: One per input.
        roles: One per input.
        names: One per input.
        results: One per leaf of what the function returned.
        spec: How the leaves are put together.
        gradient_slots: Slots whose gradients at the start are inputs.
        leaves: Slots that may have gradients.
        gradients: Output and slot of each gradient that is left when the step ends.
        batch_gradients: The same for tensors of the batch: output and position.
        rebound: Output and slot of each buffer that was replaced instead of written to.
        effects: What the step does in Python.
        first: What of that comes before the numbers are read.
        conditions: What it found in Python.
        free: Slots whose gradients at the start do not matter.
        cleared: Slots whose gradient the step takes away.
        answers: What the function was told about numbers.
        living: Slots whose values the terms of these answers have after the numbers.
        scalers: Of losses (GradScaler) that it uses.
        recomputed: Attributes of modules that outputs belong to.
        batch_with_gradient: Positions of tensors of the batch whose gradients are inputs.
        promoted_types: Of the numbers in Python that are inputs.
        aliases: Memory that several slots share; it is the last inputs.
    """

    module: fx.GraphModule
    fakes: tuple[Tensor, ...]
    roles: tuple[Role, ...]
    names: tuple[str, ...]
    results: tuple[Result, ...]
    spec: Any
    gradient_slots: tuple[int, ...]
    leaves: tuple[int, ...]
    gradients: tuple[tuple[int, int], ...]
    batch_gradients: tuple[tuple[int, int], ...]
    rebound: tuple[tuple[int, int], ...]
    effects: tuple[Effect, ...]
    first: tuple[Effect, ...]
    conditions: Conditions
    free: frozenset[int]
    cleared: tuple[int, ...]
    answers: tuple[Answer, ...]
    living: tuple[int, ...]
    scalers: tuple[Any, ...]
    recomputed: tuple[Recomputed, ...]
    batch_with_gradient: tuple[int, ...]
    promoted_types: list[type]
    aliases: Aliases


class UndeclaredTensors(Exception):
    """The step used tensors that are neither given to it nor of its models and optimizers.

    Args:
        places: Where they live; a tensor that is found nowhere lives in a list of its own.
    """

    def __init__(self, places: Sequence[Place]):
        super().__init__(f"{len(places)} tensors by closure")
        self.places = list(places)


def numbers_of(definition: Definition, batch: Sequence[Any]) -> list[Any]:
    """The numbers that are inputs: of the optimizers, then of the batch."""
    numbers = [read_number(place) for place in group_numbers(definition.optimizers)]
    return numbers + [x for x in batch if isinstance(x, float)]

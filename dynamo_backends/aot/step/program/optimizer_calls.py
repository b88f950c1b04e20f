"""Calls of optimizers in a trace: their steps, and what their `zero_grad` does to gradients."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.aot.step.program.recording import Definition
from dynamo_backends.aot.step.program.substitution import Substitution
from dynamo_backends.aot.step.replaced import replaced


class OptimizerCalls:
    """Inside, calls of a step's optimizers are those of a trace.

    Args:
        definition: Of the step.
        substitution: Of the trace.

    Attributes:
        cleared: Ids of the parameters whose gradients were thrown away before any was computed.
        cleared_late: Ids of those that had none when gradients were thrown away later.
        begun: Whether a gradient was computed, or an optimizer's step taken.
    """

    def __init__(self, definition: Definition, substitution: Substitution):
        self._definition = definition
        self._substitution = substitution
        self._stack = contextlib.ExitStack()
        self.cleared: set[int] = set()
        self.cleared_late: set[int] = set()
        self.begun = False

    def __enter__(self) -> "OptimizerCalls":
        """Takes the place of the methods of optimizers and models."""
        for optimizer in self._definition.optimizers:
            parameters = [p for g in optimizer.param_groups for p in g["params"]]
            self._stack.enter_context(replaced(optimizer, "step", self._step(optimizer)))
            self._stack.enter_context(replaced(optimizer, "zero_grad", self._clear(parameters)))
        for model in self._definition.models:
            clear = self._clear(list(model.parameters()))
            self._stack.enter_context(replaced(model, "zero_grad", clear))
        return self

    def __exit__(self, *error: Any) -> None:
        """Puts the methods back."""
        self._stack.close()

    def _step(self, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
        def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.begun = True
            with self._substitution.optimizer_step(optimizer) as formula:
                return (original if formula is None else formula)(*args, **kwargs)

        return step

    def _clear(self, parameters: Sequence[Tensor]) -> Callable[..., Any]:
        def clear(original: Callable[..., Any], set_to_none: bool = True) -> Any:
            with self._substitution.clearing():
                if set_to_none:
                    without = {id(p) for p in parameters if p.grad is None}
                    (self.cleared_late if self.begun else self.cleared).update(without)
                return original(set_to_none=set_to_none)

        return clear

"""State that an optimizer makes while a step is traced: it is taken away, and refused."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dynamo_backends.interface.errors import StepCaptureError


class NewStateError(StepCaptureError):
    """An optimizer makes state in a step that is traced."""


@contextlib.contextmanager
def refusing_new_state(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Inside a step is traced: new state is refused, and nothing of it stays.

    Args:
        optimizers: Of the step.

    Raises:
        NewStateError: In eager there would be new state.
    """
    before = [(state, dict.fromkeys(state)) for state in _states(optimizers)]
    try:
        yield
        key = next((key for state, keys in before for key in state if key not in keys), None)
        if key is not None:
            raise NewStateError(
                f"the optimizer makes new state ({key!r}) in the middle of training, which one "
                "graph cannot hold. Make all state at the first step."
            )
    finally:
        for state, keys in before:
            for key in [k for k in state if k not in keys]:
                del state[key]


def _states(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[dict[Any, Any]]:
    for optimizer in optimizers:
        yield optimizer.state
        yield from optimizer.state.values()

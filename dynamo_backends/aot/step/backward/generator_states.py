"""The state of torch's generator that a reentrant checkpoint keeps and puts back: part of a record.

It draws the same numbers again, and then goes on where it was. So a program, which draws each
number once, leaves the generator as eager does. Other code that puts the generator back cuts.
"""

import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.overrides import handle_torch_function
from torch.utils import checkpoint

from dynamo_backends._torch_private.nodes import generator_state, set_generator_state
from dynamo_backends._torch_private.placeholders import function_mode_depth
from dynamo_backends.aot.step.backward.tape import current_tape


@dataclass(frozen=True)
class GeneratorState:
    """Stands for a state.

    Attributes:
        number: Which one of the calls since the last cut.
    """

    number: int


def keep_state() -> None:
    """Keeps the state."""
    if function_mode_depth():
        handle_torch_function(keep_state, ())
        return
    current_tape().states.append(generator_state())


def use_state(number: int) -> None:
    """Puts a state back."""
    if function_mode_depth():
        handle_torch_function(use_state, (), number)
        return
    set_generator_state(current_tape().states[number])


def get_state(session: Any) -> GeneratorState | None:
    """What `torch.get_rng_state` returns to a checkpoint; None to others."""
    if torch.cuda.is_initialized() or not _is_called_by_checkpoint():
        return None
    keep_state()
    return session.nested.next_state()


def _is_called_by_checkpoint() -> bool:
    frame: FrameType | None = sys._getframe(3)
    for _ in range(4):  # past `torch.random.fork_rng`, and what enters that
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == checkpoint.__name__:
            return True
        frame = frame.f_back
    return False

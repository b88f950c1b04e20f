"""Steps that eager refuses: what torch.distributions validates, and what such a step leaves."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import torch
from torch import Tensor

from dynamo_backends.aot.step.copies import Copies
from dynamo_backends.runtime.atomic import write

_MODE_FRAMES = 12  # between a mode and what has called a function of torch's, at most


def is_validation() -> bool:
    """Inside a torch function mode: whether torch.distributions validates arguments."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MODE_FRAMES):
        if frame is None:
            break
        if frame.f_globals.get("__name__") == torch.distributions.distribution.__name__:
            return True
        frame = frame.f_back
    return False


@contextmanager
def all_or_nothing(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Inside: a step in eager. If it fails, tensors and gradients are what they were before."""
    gradients = [t.grad for t in tensors]
    living = [*tensors, *(g for g in gradients if g is not None)]
    copies = Copies({i: t.detach() for i, t in enumerate(living)})
    try:
        yield
    except BaseException:
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = gradient
        before = copies.load()
        targets = [t.detach() for t in living]
        write(targets, [before[i].to(t.device) for i, t in enumerate(targets)], [], None)
        raise
    finally:
        copies.close()

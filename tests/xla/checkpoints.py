"""Checkpoints of training on a device: read in eager, and read back."""

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dynamo_backends.runtime.device_tensor import DeviceTensor

Pair = tuple[
    nn.Module, torch.optim.Optimizer, Callable[..., Any],
    nn.Module, torch.optim.Optimizer, Callable[..., Any],
]  # fmt: skip
"""A model, its optimizer and its compiled step; then the same in eager."""


def go_on_from_checkpoints(
    pair: Pair,
    batch: Callable[[], tuple[Any, ...]],
    assert_equal: Callable[[nn.Module, nn.Module], None],
) -> None:
    """Trains, goes on in eager from a checkpoint, and goes back to it on both sides.

    Args:
        pair: Of which nothing was trained yet.
        batch: Makes the arguments of a step.
        assert_equal: Compares the parameters of two models.
    """
    model, optimizer, step, eager, reference, expected = pair
    step(*batch())
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    assert not any(isinstance(x, DeviceTensor) for x in saved["model"].values())
    eager.load_state_dict(saved["model"])
    assert all(torch.equal(x, eager.state_dict()[k]) for k, x in model.state_dict().items())
    reference.load_state_dict(copy.deepcopy(saved["optimizer"]))
    _trained(step, expected, batch)
    assert_equal(model, eager)
    model.load_state_dict(saved["model"])
    eager.load_state_dict(saved["model"])
    for each in (optimizer, reference):
        each.load_state_dict(copy.deepcopy(saved["optimizer"]))
    _trained(step, expected, batch)
    assert_equal(model, eager)


def _trained(step: Callable[..., Any], expected: Callable[..., Any], batch: Any) -> None:
    for _ in range(2):
        given = batch()
        step(*given)
        expected(*given)

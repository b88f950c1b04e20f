"""Weights that are edited, replaced, loaded or moved after compilation: each call sees them."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dynamo_backends.conformance.comparing import assert_close, assert_same, ensure
from dynamo_backends.conformance.registering import Table
from dynamo_backends.conformance.subject import Function, Subject, float64_copy, gradients

CHECKS = Table()


def net() -> nn.Sequential:
    """Returns a small net with a convolution, batch normalisation and a product."""
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 16, 5)
    ).eval()


INPUT = (2, 4, 4, 4)
"""The shape of what `net` takes."""


def _fused_step(module: Any) -> None:
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.AdamW(module.parameters(), lr=0.1, fused=True).step()


def _add_to_data(module: Any) -> None:
    for p in module.parameters():
        p.data.add_(0.5)


def _new_data(module: Any) -> None:
    for p in module.parameters():
        p.data = p.data * 2 + 0.1


def _in_place(module: Any) -> None:
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(0.5).add_(0.1)


def _one_element(module: Any) -> None:
    with torch.no_grad():
        module[3].weight[2, 7] += 40


def _by_numpy(module: Any) -> None:
    module[3].bias.detach().numpy()[1] += 3


def _new_parameter(module: Any) -> None:
    module[0].weight = nn.Parameter(module[0].weight.detach() * 2)
    module[3].bias = nn.Parameter(module[3].bias.detach() + 1)


def _new_statistics(module: Any) -> None:
    module[1].running_mean.add_(1)
    module[1].running_var.mul_(2)


def _load(module: Any) -> None:
    module.load_state_dict(net().state_dict())


def _assign(module: Any) -> None:
    module.load_state_dict(net().state_dict(), assign=True)


def _new_layer(module: Any) -> None:
    module[3] = nn.Linear(8 * 16, 5)


CHANGES: dict[str, Callable[[Any], None]] = {
    "in place": _in_place,
    "one element": _one_element,
    "p.data": _add_to_data,
    "new p.data": _new_data,
    "through numpy": _by_numpy,
    "fused optimizer": _fused_step,
    "load_state_dict": _load,
    "load_state_dict that assigns": _assign,
    "new Parameter": _new_parameter,
    "new layer": _new_layer,
    "buffers": _new_statistics,
}
"""Ways of changing a module's weights."""


def assert_follows_weights(
    compiled: Function, module: nn.Module, x: Tensor, changes: Sequence[str]
) -> None:
    """Asserts that compiled calls see each in-place or replaced weight.

    Args:
        compiled: The module, compiled.
        module: Made by `net`.
        x: X of the shape `INPUT`.
        changes: Keys of `CHANGES`.

    Raises:
        AssertionError: A call did not.
    """
    for change in changes:
        with torch.no_grad():
            for _ in range(2):
                compiled(x)
            before = module(x)
        CHANGES[change](module)
        with torch.no_grad():
            expected, found = module(x), compiled(x)
            ensure(not torch.allclose(before, expected), "the change must matter")
            ensure(not torch.equal(found, before), f"the weights from before the change: {change}")
            assert_same(expected, found, float64_copy(module)(x.double()))


@CHECKS.each({name: [name] for name in CHANGES})
def changed(subject: Subject, value: list[str]) -> None:
    """Makes one change twice."""
    module = net()
    assert_follows_weights(subject.compile(module), module, torch.randn(INPUT), value * 2)


@CHECKS.add
def changed_in_all_ways_one_after_the_other(subject: Subject) -> None:
    """Makes all changes of one module, one after the other."""
    module = net()
    assert_follows_weights(subject.compile(module), module, torch.randn(INPUT), list(CHANGES))


@CHECKS.each({str(d).removeprefix("torch."): d for d in (torch.float64, torch.bfloat16)})
def moved_to(subject: Subject, value: torch.dtype) -> None:
    """Another dtype, and back."""
    module, x = net(), torch.randn(INPUT)
    compiled = subject.compile(module)
    with torch.no_grad():
        for dtype in (torch.float32, value, torch.float32):
            module.to(dtype)
            given = x.to(dtype)
            expected, found = module(given), compiled(given)
            assert_same(expected, found, float64_copy(module)(given.double()))


@CHECKS.add
def changed_between_training_steps(subject: Subject) -> None:
    """Gradients of the weights that are there."""
    module, x = net(), torch.randn(INPUT)
    compiled = subject.compile(module)
    for change in (_in_place, _new_parameter, _load):
        ours, theirs = gradients(compiled, module, (x,)), gradients(module, module, (x,))
        wide = copy.deepcopy(module).double()
        assert_same(theirs, ours, gradients(wide, wide, (x.double(),)), "gradient")
        change(module)


@CHECKS.add
def frozen_and_trained_again(subject: Subject) -> None:
    """Parameters that stop requiring gradients, and begin again."""
    module: Any = net()
    x, compiled = torch.randn(INPUT), subject.compile(module)
    for frozen in (False, True, False):
        module[3].requires_grad_(not frozen)
        ours, theirs = gradients(compiled, module, (x,)), gradients(module, module, (x,))
        wide = copy.deepcopy(module).double()
        assert_same(theirs, ours, gradients(wide, wide, (x.double(),)), "gradient")


@CHECKS.add
def tied_weights(subject: Subject) -> None:
    """One parameter in two places, which are untied after compilation."""
    module: Any = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).eval()
    module[2].weight = module[0].weight
    compiled, x = subject.compile(module), torch.randn(3, 6)
    with torch.no_grad():
        assert_close(compiled(x), module(x))
        module[0].weight.mul_(-2)
        assert_close(compiled(x), module(x))
        module[2].weight = nn.Parameter(torch.randn(6, 6))
        assert_close(compiled(x), module(x))

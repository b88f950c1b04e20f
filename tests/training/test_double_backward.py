"""Gradients of gradients are refused in words that help; whatever does not need them works."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends

OPENXLA = dynamo_backends.compiler("openxla")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def penalty(function: Any, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    return gradient.square().sum()


def batch() -> Tensor:
    return torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4).requires_grad_()


@pytest.mark.parametrize("times", [1, 2])
def test_a_gradient_penalty_is_refused_and_says_what_to_do(times: int) -> None:
    compiled = torch.compile(net(), backend=OPENXLA)
    for _ in range(times):
        with pytest.raises(dynamo_backends.DoubleBackwardError) as caught:
            penalty(compiled, batch()).backward()
    assert isinstance(caught.value, RuntimeError), "what torch raises"
    for words in ("double backward", "in eager", "torch.compiler.disable"):
        assert words in str(caught.value)


def test_the_first_gradients_are_there_all_the_same() -> None:
    module, x = net(), batch()
    compiled = torch.compile(module, backend=OPENXLA)
    (ours,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    (theirs,) = torch.autograd.grad(module(x).sum(), x)
    torch.testing.assert_close(ours.detach(), theirs)


def test_what_the_message_proposes_works() -> None:
    module, x = net(), batch()
    compiled = torch.compile(module, backend=OPENXLA)

    def loss(first: Any) -> Tensor:
        return first(x).square().sum() + torch.compiler.disable(penalty)(module, x)

    loss(compiled).backward()
    ours = [p.grad for p in module.parameters()]
    module.zero_grad()
    loss(module).backward()
    theirs = [p.grad for p in module.parameters()]
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_a_graph_that_is_kept_can_run_again() -> None:
    module = net()
    value = torch.compile(module, backend=OPENXLA)(batch()).sum()
    value.backward(retain_graph=True)
    once = [p.grad.clone() for p in module.parameters()]
    value.backward()
    torch.testing.assert_close([p.grad for p in module.parameters()], [2 * g for g in once])

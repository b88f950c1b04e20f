"""Gradients compiled and in eager, for the tests of what training promises beyond values."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends import GraphReport
from tests.checking import assert_same, tensors, widen

Loss = Callable[[Any, Tensor], Tensor]


def squares(function: Callable[..., Any], x: Tensor) -> Tensor:
    """The sum of the squares of all results."""
    return torch.stack([r.square().sum() for r in tensors(function(x))]).sum()


def gradients(
    owner: nn.Module, function: Callable[..., Any], x: Tensor, loss: Loss = squares
) -> dict[str, Any]:
    """The loss, the gradients and the buffers after one backward, and torch's next random number.

    Args:
        owner: Whose gradients to return.
        function: The module itself, or what it was compiled to.
        x: Its input.
        loss: Of the function and the input; the backward of its result is run.
    """
    owner.zero_grad()
    leaf = x.detach().clone().requires_grad_(x.requires_grad)
    torch.manual_seed(3)
    value = loss(function, leaf)
    value.backward()
    grads = {name: p.grad for name, p in owner.named_parameters()}
    return {
        "loss": value.detach(),
        **{name: None if g is None else g.clone() for name, g in grads.items()},
        "x": leaf.grad,
        **{name: b.clone() for name, b in owner.named_buffers()},
        "draw": torch.rand(1),
    }


def agree(
    module: nn.Module,
    x: Tensor,
    loss: Loss = squares,
    ops_in_eager: int | None = 0,
    backend: str = "openxla",
    **options: Any,
) -> list[GraphReport]:
    """Asserts that two backwards of a compiled module are as accurate as eager's.

    Args:
        module: In float32.
        x: Its input.
        loss: As for `gradients`.
        ops_in_eager: How many operators may run in eager, not counting those that draw random
            numbers; None: any number.
        backend: Its name.
        options: Of the backend.

    Returns:
        The reports of the compiled graphs.
    """
    twin, precise = copy.deepcopy(module), copy.deepcopy(module).double()
    compiled = torch.compile(module, backend=dynamo_backends.compiler(backend, **options))
    with dynamo_backends.record() as reports:
        for _ in range(2):
            ours = gradients(module, compiled, x, loss)
            theirs = gradients(twin, twin, x, loss)
            assert_same(theirs, ours, gradients(precise, precise, widen(x), loss))
    assert not any(r.runtime_fallbacks for r in reports), [r.runtime_fallbacks for r in reports]
    if ops_in_eager is not None:
        eager = [f for r in reports for f in r.fallbacks if f.op != "draw"]
        assert sum(f.count for f in eager) == ops_in_eager, eager
    return reports


@contextmanager
def recurrent() -> Iterator[None]:
    """Dynamo captures `nn.LSTM` and its like only when told so."""
    with torch._dynamo.config.patch(allow_rnn=True):
        yield

"""What `cudagraphs_eager` leaves to eager, asked with fake tensors on CUDA."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from dynamo_backends._torch_private import FakeTensorMode
from dynamo_backends.cudagraphs.backend import why_not


def reasons(fn: Callable[..., Any], *more: Callable[[], Tensor]) -> dict[str, str | None]:
    """What is said of each call of a function whose first input is on CUDA."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(4, 4, device="cuda"), *(make() for make in more)]
        module = make_fx(fn)(*inputs)
    calls = [n for n in module.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    return {str(n.target): why_not(n) for n in calls}


def only(found: dict[str, str | None]) -> dict[str, str]:
    return {name: reason for name, reason in found.items() if reason is not None}


TAKEN: dict[str, Callable[[Tensor], Any]] = {
    "pointwise": lambda x: (x * 2).relu() + x.exp(),
    "reduction": lambda x: x.sum(1) / x.amax(),
    "product": lambda x: torch.softmax(x @ x.t(), -1),
    "attention": lambda x: torch.ops.aten._scaled_dot_product_efficient_attention.default(
        *(x.view(1, 1, 4, 4),) * 3, None, True
    ),
    "indices": lambda x: torch.ops.aten.index.Tensor(
        x, [(torch.ops.aten.select.int(x, 0, 0) * 3).long()]
    ),
    "a number from the host": lambda x: torch.where(x > 0, x, torch.full((), 2.0)),
    "counted repetitions": lambda x: torch.ops.aten.repeat_interleave.Tensor(
        torch.ones(4, dtype=torch.int64, device="cuda"), output_size=4
    ),
    "numbers of the host": lambda x: x * (torch.full((), 2.0) + 1),
}


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name: str):
    assert only(reasons(TAKEN[name])) == {}


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str, str]] = {
    "mask written": (
        lambda x: torch.ops.aten.index_put.default(x, [x > 0], torch.zeros((), device="cuda")),
        "aten.index_put.default",
        "the host waits for the number of elements that its mask selects",
    ),
    "to the host": (lambda x: x.cpu() + 1, "aten._to_copy.default", "one of its tensors is on cpu"),
    "from the host": (
        lambda x: x + torch.ops.aten._to_copy.default(torch.full((4,), 1.0), device="cuda"),
        "aten._to_copy.default",
        "one of its tensors is on cpu",
    ),
    "a number copied": (
        lambda x: x + torch.ops.aten._to_copy.default(torch.full((), 1.0), device="cuda"),
        "aten._to_copy.default",
        "one of its tensors is on cpu",
    ),
    "eigenvectors": (
        lambda x: torch.linalg.eig(x),
        "aten.linalg_eig.default",
        "it is computed on the host",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name: str):
    fn, op, reason = REFUSED[name]
    assert only(reasons(fn))[op] == reason


def test_a_number_that_comes_with_the_call_is_not_baked_in():
    found = only(reasons(lambda x, y: x * y, lambda: torch.empty(())))
    assert found == {"aten.mul.Tensor": "one of its tensors is on cpu"}

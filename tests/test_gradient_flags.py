"""Results that share memory need gradients where eager's do, and have eager's gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import dynamo_backends
from tests.backend_checks import usable

Function = Callable[[Tensor], tuple[Tensor, ...]]

FUNCTIONS: dict[str, Function] = {
    "a view and a detached tensor": lambda x: ((y := x.cos())[:3], y.detach()),
    "a view of a detached tensor": lambda x: ((y := x.cos())[:3], y.detach()[1:], y),
    "a detached view": lambda x: ((y := x.cos()).view(-1), y.detach().sin(), y.view(-1).detach()),
    "a tensor and itself, detached": lambda x: ((y := x.cos()), y.detach()),
}


@pytest.mark.parametrize("backend", ["openxla", "onnxrt", "inductor_freezing"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_detached_results_need_no_gradient(backend: str, name: str) -> None:
    function = FUNCTIONS[name]
    compiled = torch.compile(function, backend=dynamo_backends.compiler(usable(backend)))
    ours, theirs = (torch.linspace(-1, 1, 5).requires_grad_() for _ in range(2))
    results, expected = compiled(ours), function(theirs)
    assert [x.requires_grad for x in results] == [x.requires_grad for x in expected]
    for x, y in zip(results, expected, strict=True):
        if x.requires_grad:
            (x * torch.arange(len(x))).sum().backward(retain_graph=True)
            (y * torch.arange(len(x))).sum().backward(retain_graph=True)
        else:
            x.numpy()
    torch.testing.assert_close(ours.grad, theirs.grad)
    addresses = [[x.untyped_storage().data_ptr() for x in xs] for xs in (results, expected)]
    shared = [[a == group[0] for a in group] for group in addresses]
    assert shared[0] == shared[1]

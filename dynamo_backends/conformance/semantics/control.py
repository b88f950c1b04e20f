"""Python around graphs: sizes, branches, breaks, operators that stay in eager."""

from typing import Any

import torch
from torch import Tensor, nn

from dynamo_backends.conformance.comparing import assert_close, ensure, tensors
from dynamo_backends.conformance.registering import Table
from dynamo_backends.conformance.subject import Subject

CHECKS = Table()

BATCHES = (*range(1, 17), 5, 3)


@CHECKS.each({"without gradients": False, "with gradients": True})
def a_batch_of_changing_size(subject: Subject, value: bool) -> None:
    """One module for batches of 1 to 16."""
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    compiled = subject.compile(module, dynamic=True)
    with torch.set_grad_enabled(value):
        for batch in BATCHES:
            x = torch.randn(batch, 8)
            assert_close(compiled(x), module(x))


@CHECKS.add
def shapes_as_outputs_and_in_arithmetic(subject: Subject) -> None:
    """Checks sizes that are used as numbers."""

    def fn(x: Tensor) -> tuple[Any, ...]:
        n = x.shape[0]
        return x.view(n // 2, 2, -1) * n, n, torch.arange(n, device=x.device), x.new_zeros(n, n + 1)

    compiled = subject.compile(fn, dynamic=True)
    for n in (4, 6, 10):
        x = torch.randn(n, 3)
        ours, theirs = compiled(x), fn(x)
        ensure(ours[1] == theirs[1], f"a size is {ours[1]} instead of {theirs[1]}")
        for o, t in zip(tensors(ours), tensors(theirs), strict=True):
            assert_close(o, t)


@CHECKS.add
def python_control_flow_and_graph_breaks(subject: Subject) -> None:
    """Checks branches on values."""

    def fn(x: Tensor) -> Tensor:
        x = x * 2
        if x.sum() > 0:
            return x.exp()
        torch._dynamo.graph_break()
        return x.abs() + len(x)

    compiled = subject.compile(fn)
    for x in (torch.ones(3), -torch.ones(3), torch.zeros(3)):
        assert_close(compiled(x), fn(x))


@CHECKS.add
def eager_operators_in_the_middle(subject: Subject) -> None:
    """Sizes that depend on values."""

    def fn(x: Tensor) -> Tensor:
        values, inverse = torch.unique(x.round(), return_inverse=True)
        return torch.sin(inverse.float()) * 2 + values.sum()

    subject.check(fn, torch.randn(10), fullgraph=False)


@CHECKS.add
def several_threads(subject: Subject) -> None:
    """Four threads call one compiled module, each with inputs of its own."""
    from concurrent.futures import ThreadPoolExecutor

    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2)).eval()
    compiled, inputs = subject.compile(module), [torch.randn(4, 8) for _ in range(4)]

    def work(x: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return [compiled(x) for _ in range(20)]

    work(inputs[0])
    with ThreadPoolExecutor(len(inputs)) as pool:
        found = list(pool.map(work, inputs))
    for x, results in zip(inputs, found, strict=True):
        expected = module(x).detach()
        for result in results:
            assert_close(result, expected)

"""What every backend has to do right, for the tests of one backend after the other."""

import copy
import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends import GraphReport
from dynamo_backends.conformance.weights.changes import INPUT, assert_follows_weights, net
from dynamo_backends.interface.backend import RANGED
from dynamo_backends.interface.registry import get_backend
from dynamo_backends.runtime.staging import LIMIT
from harness import check as check_model
from harness import compile_model, find_case
from tests.checking import aliases, assert_same, copy_inputs, widen


def usable(name: str) -> str:
    """The name of a backend; skips the test if it cannot be used here."""
    available = get_backend(name).availability()
    if not available.usable:
        pytest.skip(available.reason)
    return name


def agree(backend: str, fn: Callable[..., Any], *inputs: Any, **options: Any) -> list[GraphReport]:
    """Compiles a function and compares two calls with eager: values, strides, aliases, inputs."""
    compiled = torch.compile(fn, backend=dynamo_backends.compiler(backend, **options))
    with dynamo_backends.record() as reports:
        for _ in range(2):
            ours, theirs, precise = (copy_inputs(inputs) for _ in range(3))
            results, expected = compiled(*ours), fn(*theirs)
            assert_same(expected, results, widen(fn)(*(widen(x) for x in precise)))
            assert_same(theirs, ours, theirs)
            assert aliases(results, ours) == aliases(expected, theirs)
    assert reports, "nothing was compiled"
    assert not any(r.runtime_fallbacks for r in reports), [r.runtime_fallbacks for r in reports]
    return reports


def ran_on_backend(reports: list[GraphReport]) -> bool:
    """Whether all operators that were captured ran on the backend, and there were some."""
    return sum(r.ops_on_backend for r in reports) > 0 and not any(r.fallbacks for r in reports)


def _mutates(x: Tensor, y: Tensor) -> Tensor:
    x.add_(1).mul_(y)
    y[0] = 5
    x[:, 1:3].sigmoid_()
    return x + y


def _views(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2 + 1
    return x.t(), x[1:], y, y.view(-1), y.t(), y[::2].exp()


def _expands(x: Tensor) -> tuple[Tensor, ...]:
    y = (x + 1).sum(0)
    return y.expand(3, *y.shape), y.unsqueeze(1).expand(*y.shape, 2) * 2, x


def _mixes(x: Tensor) -> tuple[Tensor, ...]:
    return x * 2 + 1, x.sum(), (x > 0) & (x < 2), x.flip(0)


def _truncates(x: Tensor) -> tuple[Tensor, ...]:
    return x + 1, x * 3, x // 2, x == 1, torch.cat([x, x])


def _full(x: Tensor) -> Tensor:
    numbers = torch.arange(x.shape[-1], device=x.device)
    return torch.zeros_like(x) + numbers + torch.ones((), device=x.device) * x


SEMANTICS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]]]] = {
    "mutation": (_mutates, lambda: (torch.randn(4, 6), torch.randn(4, 6))),
    "views": (_views, lambda: (torch.randn(4, 6),)),
    "expanded": (_expands, lambda: (torch.randn(4, 6),)),
    "strided": (_mixes, lambda: (torch.randn(8, 10)[::2, 1::3],)),
    "channels_last": (_mixes, lambda: (torch.randn(2, 3, 4, 5).contiguous(
        memory_format=torch.channels_last),)),
    "0-d": (lambda x: (x + 1, x.exp() * 2 - 1), lambda: (torch.tensor(3.0),)),
    "empty": (_mixes, lambda: (torch.randn(0, 4),)),
    "int64": (_truncates, lambda: (torch.tensor([2**40 + 1, -3, 0, 1]),)),
    "bool": (lambda x: (x & ~x, x | x.flip(0), x.sum() * 2), lambda: (torch.rand(6) > 0.5,)),
    "factories": (_full, lambda: (torch.randn(3, 4),)),
    "negated": (
        lambda x: (x.relu() * 2, x.t() @ x + 1), lambda: (torch.randn(3, 4).cfloat().conj().imag,)
    ),
    "conjugated": (
        lambda x: ((x * 2).conj(), x.imag * 3, (x + 1).abs().conj() - 1),
        lambda: (torch.randn(3, 4, dtype=torch.complex64).conj(),),
    ),
}  # fmt: skip


def mlp() -> nn.Module:
    """A small net of linear layers, 6 to 3."""
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


def compiled(
    backend: str, module: nn.Module, *inputs: Tensor, **options: Any
) -> tuple[Any, GraphReport, Any]:
    """A compiled module that ran once, its report and its only executable."""
    torch._dynamo.reset()
    function = torch.compile(module, backend=dynamo_backends.compiler(backend, **options))
    with torch.no_grad(), dynamo_backends.record() as reports:
        function(*inputs)
    (block,) = reports[0].executable.static_program.blocks
    return function, reports[0], block.executable


def never_stale(backend: str, changes: list[str]) -> int:
    """Changes weights one way after the other; every call must see them. Returns the rebinds."""
    module, x = net(), torch.randn(INPUT)
    compiled = torch.compile(module, backend=dynamo_backends.compiler(backend))
    with dynamo_backends.record() as reports:
        assert_follows_weights(compiled, module, x, changes)
    assert not any(r.runtime_fallbacks for r in reports), [r.runtime_fallbacks for r in reports]
    return sum(r.rebinds for r in reports)


def follows_the_batch(backend: str) -> None:
    """One graph with a dynamic batch, one executable per batch size, or for all of them."""
    executables = 1 if get_backend(backend).dynamic_shapes == RANGED else 3
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)).eval()
    compiled = torch.compile(module, backend=dynamo_backends.compiler(backend), dynamic=True)
    with dynamo_backends.record() as reports, torch.no_grad():
        for batch in (2, 3, 5, 3):
            x = torch.randn(batch, 8)
            torch.testing.assert_close(compiled(x), module(x))
    assert [r.executables for r in reports] == [executables]


def results_are_the_callers(backend: str) -> None:
    """Results stay as they are when inputs change and later calls are made, whatever their sizes.

    A runtime may copy what is small; inputs are small, large and of both kinds here, and so are
    outputs. They come with gaps, in another order of dimensions, and from inference mode.
    """

    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (x + 1) * 3, (y * 2 - 1).abs(), (x - 3).abs().sum(), y.t() * 2

    large = LIMIT // 8 + 1  # rows of two float32
    for rows in ((4, 4), (4, large), (large, 4), (large, large)):
        torch._dynamo.reset()
        compiled = torch.compile(f, backend=backend, dynamic=False)
        with torch.inference_mode(), dynamo_backends.record() as reports:
            compiled(*(torch.randn(n, 2) for n in rows))
        assert ran_on_backend(reports), reports[0].fallbacks
        for make in (lambda n: torch.randn(n, 2), lambda n: torch.randn(2, n).t()):
            kept = []
            for _ in range(3):
                x, y = map(make, rows)
                with torch.no_grad():
                    kept.append((compiled(x, y), f(x, y)))
                x.zero_()
                y.zero_()
            for found, expected in kept:
                torch.testing.assert_close(found, expected)


def each_call_has_results_of_its_own(function: Callable[..., Any], x: Tensor) -> None:
    """Calls return new memory, and a later call with other numbers leaves earlier results alone."""
    with torch.no_grad():
        first, second = function(x), function(x)
        before = first.clone()
        function(torch.randn_like(x))
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, before)


def weights_that_change_stop_being_prepared(
    function: Callable[..., Any], module: nn.Module, executable: Any, prepared: list[Any]
) -> None:
    """Weights of `mlp` that change at every call are soon read as they are.

    Args:
        function: The module, compiled.
        module: Made by `mlp`.
        executable: Of `function`.
        prepared: Grows when weights are prepared.
    """
    x = torch.randn(4, 6)
    prepared.clear()
    with torch.no_grad():
        for _ in range(8):
            module[0].weight.mul_(1.1)
            torch.testing.assert_close(function(x), module(x))
        assert len(prepared) < 4
        assert "_live" in vars(executable)
        module[0].weight.data = torch.randn(8, 6)
        torch.testing.assert_close(function(x), module(x))


def threads_agree(function: Callable[..., Any], model: nn.Module, *shape: int) -> None:
    """Eight threads call a compiled model at once, each with an input of its own."""

    def work(x: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return [function(x) for _ in range(50)]

    inputs = [torch.randn(shape) for _ in range(8)]
    with ThreadPoolExecutor(len(inputs)) as pool:
        results = list(pool.map(work, inputs))
    for x, found in zip(inputs, results, strict=True):
        expected = model(x).detach()
        for result in found:
            torch.testing.assert_close(result, expected)


def gradients_agree(backend: str) -> None:
    """Gradients of a small training graph."""
    module = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))
    x = torch.randn(3, 6)

    def gradients(model: Any, owner: nn.Module, x: Tensor) -> list[Tensor]:
        owner.zero_grad()
        model(x).square().sum().backward()
        return [p.grad.clone() for p in owner.parameters()]

    with dynamo_backends.record() as reports:
        compiled = torch.compile(module, backend=dynamo_backends.compiler(backend))
        ours = gradients(compiled, module, x)
    twin = copy.deepcopy(module).double()
    assert_same(gradients(module, module, x), ours, gradients(twin, twin, x.double()))
    assert {r.kind for r in reports} == {"forward", "backward"}


def model_is_right(backend: str, suite_name: str, name: str, may_fail: bool = False) -> GraphReport:
    """One model of a suite at the size of tests, with inputs other than those of compiling.

    Args:
        backend: Its name.
        suite_name: Of `dynamo_backends.bench.suites`.
        name: Of the model.
        may_fail: Compiled blocks may fail at run time, so that they run in eager.
    """
    case = find_case(suite_name, name, "test")
    model = case.make()
    with torch.no_grad():
        compiled = compile_model(model, case.inputs(), backend, fullgraph=True)
        other = dataclasses.replace(case, seed=case.seed + 100).inputs()
        for _ in range(2):
            accuracy = check_model(model, compiled.function, other)
            assert accuracy.passed, accuracy
    (report,) = compiled.reports
    assert report.ops_on_backend > 0
    assert may_fail or report.runtime_fallbacks == []
    # A block may fail after its first call was compared.
    assert report.verified <= report.blocks <= report.verified + len(report.runtime_fallbacks)
    assert report.unverified == []
    return report

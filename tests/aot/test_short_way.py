"""Calls of inference graphs: past AOT Autograd's wrapper, unless it has something to do."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dynamo_backends.pipeline.compiled_graph import CompiledGraph


class Ways:
    """For each call of a graph: whether it came through the wrapper, and the modes there."""

    def __init__(self) -> None:
        self.through_wrapper: list[bool] = []
        self.grad_modes: list[bool] = []
        self.autocast: list[bool] = []

    def note(self) -> None:
        names = set()
        frame: Any = sys._getframe()
        while frame is not None:
            names.add(frame.f_code.co_name)
            frame = frame.f_back
        self.through_wrapper.append("runtime_wrapper" in names)
        self.grad_modes.append(torch.is_grad_enabled())
        self.autocast.append(torch.is_autocast_enabled("cpu"))


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Ways:
    found, original = Ways(), CompiledGraph.__call__

    def call(self: CompiledGraph, args: list[Any]) -> Any:
        found.note()
        return original(self, args)

    monkeypatch.setattr(CompiledGraph, "__call__", call)
    return found


def results(function: Callable[..., Any], *inputs: Any) -> list[Any]:
    """What three calls return, each on inputs of its own."""
    return [
        function(*(x.clone() if isinstance(x, Tensor) else x for x in inputs)) for _ in range(3)
    ]


def same(found: list[Any], expected: list[Any]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_only_the_first_call_goes_through_the_wrapper(ways: Ways):
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin() @ y, (x + 1).cos()

    inputs = torch.randn(4, 5), torch.randn(5, 3)
    same(results(torch.compile(f, backend="openxla"), *inputs), results(f, *inputs))
    assert ways.through_wrapper == [True, False, False]


def _update(x: Tensor) -> Tensor:
    x.mul_(2)
    return x.sin().cos()


def _view(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin().cos(), x[1:]


@torch.no_grad()
def test_a_graph_writes_to_its_inputs_itself(ways: Ways):
    compiled = torch.compile(_update, backend="openxla")
    for _ in range(3):
        x = torch.randn(3, 4)
        given = x.clone()
        same([compiled(given), given], [_update(x), x])
    assert ways.through_wrapper == [True, False, False]


@torch.no_grad()
def test_what_aot_autograd_does_after_the_graph_is_done_at_each_call(ways: Ways):
    compiled = torch.compile(_view, backend="openxla")
    for _ in range(3):
        x = torch.randn(3, 4)
        found = compiled(x)
        same([found], [_view(x)])
        assert found[1]._base is x
    assert ways.through_wrapper == [True] * 3


@torch.no_grad()
def test_inputs_that_are_parts_of_one_tensor(ways: Ways):
    """AOT Autograd gives the graph the tensor that they are views of."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return (x * y).sin()

    compiled = torch.compile(f, backend="openxla")
    for _ in range(3):
        x = torch.randn(4)
        given = x.clone()
        same([compiled(given[:3], given[1:]), given], [f(x[:3], x[1:]), x])
    assert ways.through_wrapper == [True] * 3


@torch.no_grad()
def test_one_tensor_given_twice(ways: Ways):
    def f(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sin()

    compiled = torch.compile(f, backend="openxla")
    for _ in range(3):
        x = torch.randn(3)
        same([compiled(x, x)], [f(x, x)])
    assert ways.through_wrapper == [True, False, False]


def test_autocast_is_off_inside(ways: Ways):
    def f(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y).sin() + 1

    inputs = torch.randn(4, 4), torch.randn(4, 4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = results(torch.compile(f, backend="openxla"), *inputs)
        expected = results(f, *inputs)
    torch.testing.assert_close(found, expected)
    assert ways.autocast == [False] * 3
    assert ways.through_wrapper == [True] * 3


def test_the_grad_mode_is_off_inside_and_what_the_caller_set_after(ways: Ways):
    def f(x: Tensor, y: Tensor) -> Tensor:
        return (x.detach() * y).sin() + 1

    x, y = torch.randn(3, requires_grad=True), torch.randn(3)
    compiled = torch.compile(f, backend="openxla")
    for _ in range(3):
        result = compiled(x, y)
        assert torch.is_grad_enabled()
        assert not result.requires_grad
    assert ways.through_wrapper == [True, False, False]
    assert ways.grad_modes == [False] * 3


@torch.no_grad()
def test_a_grad_mode_that_the_function_sets_is_set(ways: Ways):
    def f(x: Tensor) -> Tensor:
        y = x.sin().cos()
        torch._C._set_grad_enabled(True)
        return y

    compiled = torch.compile(f, backend="openxla")
    for _ in range(3):
        with torch.no_grad():
            compiled(torch.ones(3))
            assert torch.is_grad_enabled()
    assert ways.through_wrapper == [True] * 3


@torch.no_grad()
def test_sizes_of_results_that_change_are_marked_as_such_at_each_call(ways: Ways):
    def f(x: Tensor) -> Tensor:
        return (x.sin() + x.shape[0]).cos()

    compiled = torch.compile(f, backend="openxla", dynamic=True)
    for size in (3, 4, 5):
        x = torch.randn(size)
        same([compiled(x)], [f(x)])
    assert ways.through_wrapper == [True] * 3


def test_training_graphs_are_left_to_aot_autograd(ways: Ways):
    x = torch.randn(3, requires_grad=True)
    compiled = torch.compile(lambda x: (x.sin() * 2).cos(), backend="openxla")
    for _ in range(2):
        compiled(x).sum().backward()
    forward = ways.through_wrapper[::2]
    assert forward == [True, True]

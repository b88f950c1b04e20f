"""`run`, `disable` and `reset`: what is compiled is used, and nothing else is compiled."""

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends import disable, optimize, reset, run
from dynamo_backends.interface.stance import compiles_nothing
from tests.capture.programs import Counting, state, toy, wave


@pytest.fixture(autouse=True)
def _nothing_stays_changed() -> Iterator[None]:
    before = state()
    yield
    assert state() == before


class Marked(Counting):
    """Its graphs give twice what eager gives: it shows which of the two ran."""

    def __call__(self, gm: Any, example_inputs: Any) -> Any:
        forward = super().__call__(gm, example_inputs)
        return lambda *args: tuple(2 * x for x in forward(*args))


def eager(x: Tensor) -> Tensor:
    """What `wave` gives; it has code of its own, which nobody compiles."""
    return torch.add(torch.sin(x), 1)


def compiled_with(compiler: Counting, how: str) -> Callable[..., Any]:
    if how == "optimize":
        return optimize(compiler)(wave)  # type: ignore[no-any-return]
    return torch.compile(wave, backend=compiler, fullgraph=how == "fullgraph")


@pytest.mark.parametrize("how", ["optimize", "torch.compile", "fullgraph"])
def test_under_run_a_new_shape_compiles_nothing_and_is_right(how: str) -> None:
    compiler = Marked()
    compiled = compiled_with(compiler, how)
    x, new = torch.randn(3), torch.randn(5, 2)
    compiled(x)
    assert compiler.count == 1
    with run():
        assert compiles_nothing()
        assert torch.equal(compiled(x), 2 * eager(x))  # reused
        assert torch.equal(compiled(new), eager(new))  # in eager
    assert torch.equal(run()(compiled)(x), 2 * eager(x))
    assert torch.equal(run()(compiled)(new), eager(new))
    assert compiler.count == 1
    assert not compiles_nothing()
    assert torch.equal(compiled(new), 2 * eager(new))
    assert compiler.count == 2


def test_a_new_dtype_and_a_new_branch_under_run() -> None:
    compiler = Counting()
    compiled = optimize(compiler)(toy)
    ones = torch.ones(4)
    compiled(ones, ones)
    count = compiler.count
    with run():
        assert torch.equal(compiled(-ones, -ones), ones)
        assert compiled(ones.double(), ones.double()).dtype == torch.float64
    assert compiler.count == count == 1


def test_run_and_optimize_nested_either_way() -> None:
    compiler = Counting()
    x = torch.randn(3)
    with run(), optimize(compiler):
        assert torch.equal(wave(x), torch.sin(x) + 1)
        assert torch.equal(optimize(compiler)(toy)(x, x), toy(x, x))
    assert compiler.count == 0
    with optimize(compiler):
        with run(), run():
            wave(x)
        assert compiler.count == 0
        wave(x)
    assert compiler.count == 1


def test_a_function_under_run_called_from_a_captured_one() -> None:
    compiler = Counting()
    quiet = run()(wave)

    @optimize(compiler)
    def outer(x: Tensor) -> Tensor:
        return quiet(x * 2) - 1

    x = torch.randn(3)
    assert torch.equal(outer(x), wave(x * 2) - 1)
    assert compiler.operators() == ["mul", "sub"]


def test_a_block_of_run_inside_a_captured_function() -> None:
    compiler = Counting()

    @optimize(compiler)
    def outer(x: Tensor) -> Tensor:
        with run():
            return wave(x)

    x = torch.randn(3)
    assert torch.equal(outer(x), wave(x))
    assert compiler.count == 0


def test_modules_under_run() -> None:
    compiler = Marked()
    for module in (nn.Sequential(nn.Linear(3, 3), nn.ReLU()), _Net()):
        compiler.graphs.clear()
        compiled = optimize(compiler)(module)
        x, new = torch.randn(2, 3), torch.randn(5, 3)
        compiled(x)
        served = run()(compiled)
        for quiet in (served, run()(module)):
            assert torch.equal(quiet(x), 2 * module(x))
            assert torch.equal(quiet(new), module(new))
        assert compiler.count == 1
        assert list(served.state_dict()) == list(compiled.state_dict())


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


def test_what_a_block_captured_is_reused_under_run() -> None:
    compiler = Marked()
    module, x = nn.Sequential(nn.Linear(3, 3)), torch.randn(2, 3)
    with optimize(compiler):
        module(x)
    with run():
        assert torch.equal(module(x), 2 * torch.nn.functional.linear(x, *module[0].parameters()))
        module(torch.randn(7, 3))
    assert compiler.count == 1


def test_generators_under_run() -> None:
    compiler = Counting()
    compiled = optimize(compiler)(wave)

    @run()
    def batches(xs: list[Tensor]) -> Iterator[Tensor]:
        for x in xs:
            yield compiled(x)

    generator = batches([torch.ones(3), torch.ones(4)])
    next(generator)
    compiled(torch.ones(5))  # while it is suspended, this may be compiled
    assert compiler.count == 1
    next(generator)
    assert compiler.count == 1


def test_other_threads_still_compile() -> None:
    compiler = Counting()
    compiled = torch.compile(wave, backend=compiler)
    with run():
        thread = threading.Thread(target=compiled, args=(torch.ones(3),))
        thread.start()
        thread.join()
        assert compiler.count == 1
        compiled(torch.ones(4))
    assert compiler.count == 1


def test_threads_under_run_that_end_in_another_order() -> None:
    compiler = Counting()
    compiled = torch.compile(wave, backend=compiler)
    entered, left = threading.Event(), threading.Event()

    def work() -> None:
        with run():
            entered.set()
            assert left.wait(60)
            compiled(torch.ones(3))

    thread = threading.Thread(target=work)
    with run():
        thread.start()
        assert entered.wait(60)
    compiled(torch.ones(5))
    assert compiler.count == 1
    left.set()
    thread.join()
    assert compiler.count == 1


def test_the_users_own_stance_is_kept_and_comes_back() -> None:
    compiler = Counting()
    compiled = torch.compile(wave, backend=compiler)
    with torch.compiler.set_stance("force_eager"), run():
        compiled(torch.ones(3))
    with run(), torch.compiler.set_stance("force_eager"):
        compiled(torch.ones(3))
    assert compiler.count == 0
    compiled(torch.ones(3))
    assert compiler.count == 1


def test_an_exception_under_run_restores_the_state() -> None:
    before = state()
    with pytest.raises(ZeroDivisionError), run(), disable():
        raise ZeroDivisionError

    @run()
    def fail(x: Tensor) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail(torch.ones(2))
    assert state() == before


def test_disable_runs_even_compiled_code_in_eager() -> None:
    compiler = Marked()
    compiled = torch.compile(wave, backend=compiler, fullgraph=True)
    x = torch.randn(3)
    assert torch.equal(compiled(x), 2 * eager(x))
    with disable(), run(), optimize(compiler):
        assert torch.equal(compiled(x), eager(x))
    with run(), disable():
        assert torch.equal(compiled(x), eager(x))
    assert torch.equal(disable()(compiled)(x), eager(x))
    module = nn.Linear(3, 3)
    compiled_module = optimize(compiler)(module)
    assert torch.equal(disable()(compiled_module)(x), module(x))
    assert compiler.count == 1


def test_a_disabled_function_is_a_graph_break_in_a_captured_one() -> None:
    compiler = Counting()
    eager = disable()(wave)

    @optimize(compiler)
    def outer(x: Tensor) -> Tensor:
        return eager(x * 2) - 1

    x = torch.randn(3)
    assert torch.equal(outer(x), wave(x * 2) - 1)
    assert compiler.operators() == ["mul", "sub"]


def test_a_disabled_generator() -> None:
    compiler = Counting()

    @disable()
    def batches(xs: list[Tensor]) -> Iterator[Tensor]:
        for x in xs:
            yield optimize(compiler)(wave)(x)

    assert len(list(batches([torch.ones(3), torch.ones(4)]))) == 2
    assert compiler.count == 0


def test_reset_forgets() -> None:
    compiler = Counting()
    compiled = optimize(compiler)(wave)
    compiled(torch.ones(3))
    reset()
    with run():
        compiled(torch.ones(3))
    assert compiler.count == 1
    compiled(torch.ones(3))
    assert compiler.count == 2


def test_under_run_no_executable_is_made_for_another_size_of_a_symbolic_graph() -> None:
    with dynamo_backends.record() as reports, torch.no_grad():
        compiled = torch.compile(lambda x: (x * 2).sin().cumsum(0), backend="openxla", dynamic=True)
        compiled(torch.ones(4))
        assert [r.executables for r in reports] == [1]
        x = torch.arange(6.0)
        with run():
            torch.testing.assert_close(compiled(x), (x * 2).sin().cumsum(0))
        assert [r.executables for r in reports] == [1]
        torch.testing.assert_close(compiled(x), (x * 2).sin().cumsum(0))
        assert [r.executables for r in reports] == [2]


def test_under_run_a_backward_graph_waits_for_its_compilation() -> None:
    def gradient() -> torch.Tensor:
        x = torch.ones(4, requires_grad=True)
        loss = compiled(x)
        with run():
            loss.backward()
        assert x.grad is not None
        return x.grad

    expected = torch.full((4,), 2 * math.cos(2.0))
    compiled = torch.compile(lambda x: (x * 2).sin().sum(), backend="openxla")
    with dynamo_backends.record() as reports:
        torch.testing.assert_close(gradient(), expected)
        assert [(r.kind, r.executables) for r in reports] == [("forward", 1), ("backward", 0)]
        x = torch.ones(4, requires_grad=True)
        compiled(x).backward()
        assert [(r.kind, r.executables) for r in reports] == [("forward", 1), ("backward", 1)]
        torch.testing.assert_close(x.grad, expected)

"""`optimize` as a decorator and as a context manager, with any compiler."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends import OptionError, UnknownBackendError, optimize
from dynamo_backends.capture.backend_resolution import resolve_backend
from tests.capture.programs import Counting, state, toy, wave


@pytest.fixture(autouse=True)
def _nothing_stays_changed() -> Iterator[None]:
    before = state()
    yield
    assert state() == before


def test_the_check_of_what_stays_changed_can_fail() -> None:
    before = state()
    scope = optimize("eager", dynamic=True)
    with scope:
        inside = state()
    assert inside["callback"] is not before["callback"]
    assert inside["config"] != before["config"]
    assert state() == before


THREE_LINES_CALLED = []


def three_lines(gm: Any, example_inputs: Any) -> Callable[..., Any]:
    THREE_LINES_CALLED.append(example_inputs)
    return gm.forward


def test_a_compiler_of_three_lines_as_decorator_and_as_context_manager() -> None:
    THREE_LINES_CALLED.clear()
    x = torch.randn(3)

    @optimize(three_lines)
    def decorated(x: Tensor) -> Tensor:
        return x.cos() * 2

    assert torch.equal(decorated(x), x.cos() * 2)
    assert len(THREE_LINES_CALLED) == 1
    assert torch.equal(THREE_LINES_CALLED[0][0], x)
    with optimize(three_lines):
        result = wave(x)
    assert torch.equal(result, torch.sin(x) + 1)
    assert len(THREE_LINES_CALLED) == 2
    wave(torch.randn(4))
    assert len(THREE_LINES_CALLED) == 2


def test_both_forms_share_what_is_compiled() -> None:
    compiler = Counting()
    optimize(compiler)(wave)(torch.ones(3))
    with optimize(compiler):
        wave(torch.ones(3))
    assert compiler.count == 1


def test_everything_called_inside_is_captured() -> None:
    compiler = Counting()
    x = torch.randn(2, 4)
    library = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    expected = library(x)

    def helper() -> Tensor:
        return wave(library(x))

    with optimize(compiler):
        direct, inside = library(x), helper()
        torch.sin(x)  # of this frame, which is running already
    assert compiler.count == 2
    assert torch.equal(direct, expected)
    assert torch.equal(inside, torch.sin(expected) + 1)


def test_modules_of_torch_are_captured_with_weights_as_inputs_and_gradients() -> None:
    compiler = Counting()
    module = nn.Linear(4, 2)
    with optimize(compiler):
        module(torch.ones(3, 4)).sum().backward()
    assert compiler.operators() == ["linear"]
    assert torch.equal(module.weight.grad, torch.full((2, 4), 3.0))  # type: ignore[arg-type]


def test_modules_of_torch_that_dynamo_has_passed_over_before() -> None:
    compiler, module, x = Counting(), nn.Linear(4, 2), torch.ones(3, 4)

    def in_eager(x: Tensor) -> Tensor:
        for _ in range(2):  # a break in a loop leaves the whole frame to eager
            torch._dynamo.graph_break()
            x = module(x)[:, :1].expand(3, 4)
        return x

    torch.compile(in_eager, backend="eager")(x)
    with optimize(compiler):
        module(x)
    assert compiler.operators() == ["linear"]


def test_modules_methods_and_generators() -> None:
    compiler = Counting()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.half(self.linear(x))

        @optimize(compiler)
        def half(self, x: Tensor) -> Tensor:
            return x / 2

        @optimize(compiler)
        def batches(self, xs: list[Tensor]) -> Iterator[Tensor]:
            for x in xs:
                yield wave(x)

    net, x = Net().requires_grad_(False), torch.randn(2, 3)
    expected = net.linear(x) / 2
    assert torch.equal(net(x), expected)
    assert compiler.operators() == ["truediv"]
    assert torch.equal(optimize(compiler)(net)(x), expected)
    assert compiler.operators()[1:] == ["linear", "truediv"]
    generator = net.batches([x, x + 1])
    assert torch.equal(next(generator), torch.sin(x) + 1)
    wave(torch.randn(2, 3, 4))  # while it is suspended
    assert torch.equal(next(generator), torch.sin(x + 1) + 1)
    assert compiler.count == 3


def test_graph_breaks_and_both_branches() -> None:
    compiler = Counting()
    compiled = optimize(compiler)(toy)
    for sign in (1.0, -1.0):
        a, b = sign * torch.rand(4), sign * torch.rand(4)
        assert torch.equal(compiled(a, b), toy(a, b))
    assert compiler.count == 2


def test_fullgraph_refuses_graph_breaks_in_both_forms() -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"[Dd]ata-dependent"):
        optimize("eager", fullgraph=True)(toy)(torch.ones(2), torch.ones(2))
    torch._dynamo.reset()
    with (
        pytest.raises(torch._dynamo.exc.Unsupported, match=r"[Dd]ata-dependent"),
        optimize("eager", fullgraph=True),
    ):
        toy(torch.ones(2), torch.ones(2))


@pytest.mark.parametrize(("dynamic", "graphs"), [(None, 2), (True, 1), (False, 3)])
def test_dynamic_is_as_for_torch_compile(dynamic: bool | None, graphs: int) -> None:
    in_context, decorated = Counting(), Counting()
    for n in (3, 4, 5):
        with optimize(in_context, dynamic=dynamic):
            wave(torch.ones(n))
    torch._dynamo.reset()
    compiled = optimize(decorated, dynamic=dynamic)(wave)
    for n in (3, 4, 5):
        compiled(torch.ones(n))
    assert in_context.count == decorated.count == graphs


def test_nesting_the_inner_compiler_is_asked() -> None:
    outer, inner = Counting(), Counting()
    x = torch.ones(3)
    with optimize(outer):
        with optimize(inner):
            wave(x)
        toy(x, x)
        assert optimize(inner)(lambda x: x.tanh())(x).shape == (3,)
    assert inner.operators() == ["sin", "add", "tanh"]
    assert outer.operators()[:2] == ["add", "truediv"]


def test_one_object_entered_again_while_in_use() -> None:
    compiler = Counting()
    scope = optimize(compiler)

    def recurse(depth: int) -> int:
        with scope:
            wave(torch.ones(depth + 1))
            return recurse(depth - 1) + 1 if depth else 0

    with scope, scope:
        assert recurse(3) == 3
    count = compiler.count
    assert count >= 2
    toy(torch.ones(2), torch.ones(2))
    assert compiler.count == count


def test_a_scope_in_a_suspended_generator_does_not_upset_those_around_it() -> None:
    first, second = Counting(), Counting()

    def suspended() -> Iterator[None]:
        with optimize(first):
            yield

    generator = suspended()
    next(generator)
    with optimize(second):
        generator.close()
        wave(torch.ones(3))
    assert second.count == 1
    assert first.count == 0
    toy(torch.ones(2), torch.ones(2))
    assert (first.count, second.count) == (0, 1)


def test_threads_share_an_object_and_each_has_its_own_state() -> None:
    compiler = Counting()
    scope = optimize(compiler)
    inside, done = threading.Barrier(5, timeout=60), threading.Barrier(5, timeout=60)
    wrong: list[Any] = []

    def work(i: int) -> None:
        x = torch.full((4,), float(i))
        try:
            with scope:
                inside.wait()
                results = [wave(x) for _ in range(20)]
                wrong.extend(r for r in results if not torch.equal(r, torch.sin(x) + 1))
                done.wait()
            if state()["callback"] is not None:
                wrong.append("callback")
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    inside.wait()
    assert toy(torch.ones(2), torch.ones(2)).shape == (2,)  # this thread is not in the block
    done.wait()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert set(compiler.operators()) == {"sin", "add"}


def test_an_exception_inside_restores_the_state() -> None:
    before = state()
    scope = optimize("eager", dynamic=True)
    with pytest.raises(ZeroDivisionError), scope, scope:
        raise ZeroDivisionError
    assert state() == before


def test_an_exception_in_the_captured_code_restores_the_state() -> None:
    before = state()

    def fail(x: Tensor) -> Tensor:
        raise ZeroDivisionError(f"{x.sin().shape}")

    with pytest.raises(ZeroDivisionError), optimize("eager", dynamic=True):
        fail(torch.ones(2))
    assert state() == before
    with pytest.raises(ZeroDivisionError):
        optimize("eager", dynamic=True)(fail)(torch.ones(2))


def test_an_error_of_the_compiler_names_it_and_restores_the_state() -> None:
    def broken(gm: Any, example_inputs: Any) -> Any:
        raise ValueError("no such chip")

    before = state()
    with (
        pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no such chip"),
        optimize(broken),
    ):
        wave(torch.ones(2))
    assert state() == before


def test_leaving_what_was_not_entered_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"optimize\('eager'\) is not active in this thread"):
        optimize("eager").__exit__(None, None, None)


def test_options_reach_the_compiler_and_equal_ones_compile_once() -> None:
    given: list[Any] = []

    def compiler(gm: Any, example_inputs: Any, *, options: dict[str, Any]) -> Any:
        given.append(options)
        return gm.forward

    for _ in range(3):
        optimize(compiler, options={"level": 2})(wave)(torch.ones(3))
    assert given == [{"level": 2}]
    optimize(compiler, options={"level": 3})(wave)(torch.ones(3))
    assert given == [{"level": 2}, {"level": 3}]


def test_equal_arguments_give_the_same_backend() -> None:
    ours = optimize("openxla", options={"verify": True})
    assert ours.backend is optimize("openxla", options={"verify": True}).backend
    assert ours.backend is dynamo_backends.compiler("openxla", verify=True)
    given = dynamo_backends.compiler("openxla")
    assert optimize(given).backend is given
    assert optimize("openxla").backend is given
    changed = optimize(given, options={"verify": True}).backend
    assert changed is optimize(given, options={"verify": True}).backend
    theirs = resolve_backend("inductor", {"max_autotune": False})
    assert theirs is resolve_backend("inductor", {"max_autotune": False})
    assert theirs is not resolve_backend("inductor", {"max_autotune": True})


def test_a_backend_of_ours_with_options_runs() -> None:
    x = torch.randn(5)
    with dynamo_backends.record() as reports, optimize("openxla", options={"verify": True}):
        result = wave(x)
    assert [r.backend for r in reports] == ["openxla"]
    torch.testing.assert_close(result, torch.sin(x) + 1, rtol=1e-6, atol=1e-6)


def test_a_bound_method_as_compiler_compiles_once() -> None:
    class Owner:
        count = 0

        def compile(self, gm: Any, example_inputs: Any) -> Any:
            self.count += 1
            return gm.forward

    owner = Owner()
    for _ in range(3):
        optimize(owner.compile)(wave)(torch.ones(3))
    assert owner.count == 1


def test_another_packages_backend_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.backends import registry

    compiler = Counting()

    class Point:
        def load(self) -> Any:
            return compiler

    monkeypatch.setitem(registry._BACKENDS, "third_party", Point())  # type: ignore[arg-type]
    monkeypatch.setattr(registry, "_COMPILER_FNS", dict(registry._COMPILER_FNS))
    optimize("third_party")(wave)(torch.ones(3))
    assert compiler.count == 1


def test_wrong_backends_get_help() -> None:
    with pytest.raises(UnknownBackendError, match=r"'openxl'\. Did you mean 'openxla'.*Backends: "):
        optimize("openxl")
    with pytest.raises(UnknownBackendError, match=r"Did you mean .*'inductor'"):
        optimize("indutcor")
    for wrong in (3, nn.Linear(2, 2), nn.Linear):
        with pytest.raises(
            TypeError, match=r"takes a backend as its first argument.*write optimize\(\"openxla\""
        ):
            optimize(wrong)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"wave\(\) cannot be used as a backend.*list of example inputs"
    ):
        optimize(wave)


def test_wrong_options_get_help() -> None:
    with pytest.raises(OptionError, match="verify"):
        optimize("openxla", options={"verfy": True})
    with pytest.raises(OptionError, match="verify"):
        optimize(dynamo_backends.compiler("openxla"), options={"verfy": True})
    with pytest.raises(OptionError, match=r"three_lines\(\) takes no options"):
        optimize(three_lines, options={"level": 1})
    with pytest.raises(OptionError, match="options must be a mapping"):
        optimize("eager", options=["level"])  # type: ignore[arg-type]

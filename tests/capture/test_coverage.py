"""`coverage`: what is counted, and that counting changes nothing."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dynamo_backends import coverage, disable, optimize
from dynamo_backends.bench.suites.case import call
from dynamo_backends.capture import metering
from dynamo_backends.capture.metering import CallCountMode
from harness import find_case
from tests.capture.programs import Counting, state, toy, wave


@pytest.fixture(autouse=True)
def _nothing_stays_changed() -> Iterator[None]:
    before = state()
    yield
    assert state() == before


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(1))


def test_what_is_captured_whole_is_covered_whole() -> None:
    model, x = network(), torch.randn(2, 3, 8, 8)
    with CallCountMode() as eager:
        model(x)
    found = coverage(model, x)
    assert eager.count >= 5
    assert (found.ops_in_graphs, found.ops_in_eager) == (eager.count, 0)
    assert found.share_of_ops == found.share_of_time == 1.0
    assert (found.graph_calls, found.frames_compiled) == (1, 1)
    assert found.mean_ops_per_graph == found.largest_graph == eager.count
    assert found.result.shape == (2, 144)
    assert found.seconds_in_graphs > 0


def test_a_graph_break_is_counted_op_by_op() -> None:
    a, b, negative = torch.ones(4), torch.ones(4), torch.full((4,), -2.0)
    compiled = optimize("eager")(toy)
    with coverage() as found:
        compiled(a, b)
        compiled(a, negative)
    assert found.eager_ops == {"aten._local_scalar_dense.default": 2}
    first, second = found.graphs
    assert (first.ops, first.calls, first.exact) == (4, 2, True)  # add, div, sum, lt
    assert (second.ops, second.calls, second.exact) == (1, 1, True)  # mul
    assert first.function.startswith("toy (")
    assert "resume_in_toy" in second.function
    assert found.ops_in_graphs == 9
    assert found.share_of_ops == 9 / 11
    assert found.mean_ops_per_graph == 3
    assert found.largest_graph == 4
    assert found.graph_calls == 3
    assert found.frames_compiled == 2
    assert 0 < found.share_of_time < 1


@pytest.mark.parametrize("name", ["branch_on_value", "loop_until_small", "mixture_of_experts"])
@torch.no_grad()
def test_graphs_and_eager_add_up_to_the_run_without_dynamo(name: str) -> None:
    case = find_case("control_flow", name, "test")
    model, inputs = case.make(), case.inputs()
    with CallCountMode() as eager:
        expected = call(model, inputs)
    found = coverage(lambda: call(model, inputs))
    assert found.ops_in_graphs > 0
    assert found.ops_in_eager > 0
    assert found.ops_in_graphs + found.ops_in_eager == eager.count
    torch.testing.assert_close(found.result, expected, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["aot_eager", "openxla"])
def test_whatever_the_backend_the_numbers_are_the_same(backend: str) -> None:
    model, x = network().eval(), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        reference = coverage(model, x)
        found = coverage(torch.compile(model, backend=backend), x)
    assert found.ops_in_graphs == reference.ops_in_graphs
    assert found.ops_in_eager == 0


def test_capture_is_the_same_with_and_without_coverage() -> None:
    def program(compiler: Counting) -> list[Tensor]:
        compiled = optimize(compiler)(toy)
        sizes = [3, 4, 5, 3]
        return [compiled(s * torch.rand(n), s * torch.rand(n)) for n in sizes for s in (1, -1)]

    plain, measured = Counting(), Counting()
    torch.manual_seed(0)
    expected = program(plain)
    torch.manual_seed(0)
    with coverage() as found:
        results = program(measured)
    assert all(torch.equal(e, r) for e, r in zip(expected, results, strict=True))
    assert measured.operators() == plain.operators()
    assert found.frames_compiled == plain.count


def test_random_numbers_and_states_of_modules_are_not_disturbed() -> None:
    model = nn.Sequential(network(), nn.Dropout(0.5))
    x = torch.randn(2, 3, 8, 8)
    initial = {key: value.clone() for key, value in model.state_dict().items()}
    torch.manual_seed(3)
    expected = optimize("eager")(model)(x)
    updated = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(initial)
    torch.manual_seed(3)
    assert torch.equal(coverage(model, x).result, expected)
    after = model.state_dict()
    assert all(torch.equal(after[key], updated[key]) for key in updated)
    assert not torch.equal(initial["0.1.running_mean"], after["0.1.running_mean"])


def test_graphs_that_change_their_inputs() -> None:
    def change(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return y.add_(1).sum()

    x, y = torch.arange(6.0), torch.ones(2)
    found = coverage(change, x, y)
    assert torch.equal(x, 2 * torch.arange(6.0))
    assert torch.equal(y, torch.full((2,), 2.0))
    assert found.ops_in_graphs == 3
    assert found.graphs[0].exact


def test_what_was_compiled_before_is_seen() -> None:
    compiled = torch.compile(wave, backend="eager")
    compiled(torch.ones(3))
    with coverage() as found:
        compiled(torch.ones(3))
    assert found.ops_in_graphs == 2
    assert found.ops_in_eager == 1  # torch.ones


def test_recompilations_come_with_their_guards() -> None:
    compiled = optimize("eager", dynamic=False)(wave)
    inputs = [torch.ones(3), torch.ones(4), torch.ones(3, dtype=torch.float64)]
    with coverage() as found:
        for x in inputs:
            compiled(x)
    assert found.frames_compiled == 3
    size, dtype = found.recompilations
    assert size.function.startswith("wave (")
    assert "size mismatch at index 0. expected 3, actual 4" in size.reason
    assert "dtype mismatch" in dtype.reason


def test_more_recompilations_than_dynamo_keeps_records_of(tmp_path: Path) -> None:
    def make(i: int) -> Any:
        scope: dict[str, Any] = {"torch": torch}
        code = f"def f{i}(x):\n    return torch.sin(x) + {i}"
        (source := tmp_path / f"f{i}.py").write_text(code)
        exec(compile(code, str(source), "exec"), scope)
        return optimize("eager", dynamic=False)(scope[f"f{i}"])

    functions = [make(i) for i in range(40)]
    inputs = [torch.ones(2), torch.ones(3)]
    with coverage() as found:
        for function in functions:
            for x in inputs:
                function(x)
    assert found.frames_compiled == 80
    assert len(found.recompilations) == 40
    assert len({entry.function for entry in found.recompilations}) == 40


def test_restart_leaves_out_the_warm_up() -> None:
    compiled = optimize("eager")(toy)
    a, b = torch.ones(3), torch.ones(4)
    with coverage() as found:
        compiled(a, a)
        compiled(b, b)
        assert (found.frames_compiled, found.graph_calls) == (2, 2)
        found.restart()
        assert (found.ops_in_graphs, found.ops_in_eager) == (0, 0)
        compiled(a, a)
    assert (found.frames_compiled, found.recompilations) == (0, [])
    assert (found.graph_calls, found.ops_in_graphs, found.ops_in_eager) == (1, 4, 1)


def test_what_runs_in_eager_by_order_is_counted_there() -> None:
    compiled, x = torch.compile(wave, backend="eager"), torch.ones(3)
    with coverage() as found, disable():
        compiled(x)
    assert found.eager_ops == {"aten.sin.default": 1, "aten.add.Tensor": 1}
    assert found.share_of_ops == 0


def test_the_backward_pass_is_in_neither_count() -> None:
    x = torch.ones(3, requires_grad=True)
    with coverage() as found:
        optimize("eager")(wave)(x).sum().backward()
    assert found.ops_in_graphs == 2
    assert found.eager_ops == {"aten.sum.default": 1, "aten.ones_like.default": 1}
    assert x.grad is not None


def test_other_threads_are_not_counted() -> None:
    compiled = optimize("eager")(wave)

    def work() -> None:
        compiled(torch.ones(3))
        torch.ones(3).cos()

    with coverage() as found:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert (found.frames_compiled, found.graph_calls, found.ops_in_eager) == (0, 0, 0)
    assert found.share_of_ops == found.share_of_time == found.mean_ops_per_graph == 0


def test_nested_measurements() -> None:
    compiled, x = optimize("eager")(wave), torch.ones(3)
    with coverage() as outer:
        compiled(x)
        with coverage() as inner:
            compiled(x)
            x.cos()
        compiled(x)
    assert (inner.graph_calls, inner.ops_in_graphs, inner.ops_in_eager) == (1, 2, 1)
    assert (outer.graph_calls, outer.ops_in_graphs, outer.ops_in_eager) == (3, 6, 1)


def test_an_exception_inside_ends_it() -> None:
    before = state()

    def fail(x: Tensor) -> Tensor:
        raise ZeroDivisionError(f"{wave(x)}")

    compiled = optimize("eager")(wave)
    with coverage() as found:
        compiled(torch.ones(3))
        with pytest.raises(ZeroDivisionError), coverage():
            fail(torch.ones(3))
    assert state() == before
    assert found.graph_calls == 1
    optimize("eager")(wave)(torch.ones(3))
    assert found.graph_calls == 1


def test_a_graph_that_fake_tensors_cannot_run_is_counted_by_its_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(gm: Any) -> int:
        raise NotImplementedError

    monkeypatch.setattr(metering, "_count_on_fakes", refuse)
    found = coverage(wave, torch.ones(3))
    assert found.result.shape == (3,)
    assert [(g.ops, g.exact) for g in found.graphs] == [(2, False)]
    assert "2 torch calls" in str(found)


def test_print_and_json() -> None:
    compiled = optimize("eager", dynamic=False)(toy)
    with coverage() as found:
        for n in (3, 4):
            compiled(torch.ones(n), torch.ones(n))
    text = str(found)
    assert f"{found.share_of_ops:.1%}" in text
    assert "aten._local_scalar_dense.default" in text
    assert "2 calls of graphs, 4.0 operators on average, 4 at most; 2 frames compiled" in " ".join(
        text.split()
    )
    assert "size mismatch" in text
    record = json.loads(json.dumps(found.to_dict()))
    assert record["ops_in_graphs"] == 8
    assert record["graphs"][0]["calls"] == 1
    assert record["recompilations"][0]["reason"] == found.recompilations[0].reason
    assert record["eager_ops"]["aten._local_scalar_dense.default"] == 2


def test_arguments_without_a_function() -> None:
    with pytest.raises(TypeError, match=r"coverage\(\) was given arguments without a function"):
        coverage(x=1)  # type: ignore[call-overload]

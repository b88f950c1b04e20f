"""Compiled code that is slower than eager is replaced by it (tests/runtime/test_pace.py: the rule).

The clock is not a real one: each time somebody looks it is a millisecond later, and planted code
adds to that. So eager always takes one millisecond.
"""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, fx, nn

import dynamo_backends
from dynamo_backends import Availability, Backend, Executable, GraphReport, Options, Support
from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.errors import OptionError
from dynamo_backends.interface.registry import get_backend
from dynamo_backends.interface.report import SpeedReport
from dynamo_backends.pipeline.captured import compile_captured
from dynamo_backends.runtime import speed_check, speed_timing
from dynamo_backends.runtime.prepared_executables import UnfrozenExecutable
from dynamo_backends.verify import bisection
from dynamo_backends.workers.contention import System
from tests.bench.programs import ROOT

pytestmark = pytest.mark.paced

MS = 1e-3


class Clock(System):
    """Goes on when somebody looks, and when planted code says so. Nobody else is there."""

    now: ClassVar[float] = 0.0

    def wall_s(self) -> float:
        Clock.now += MS
        return Clock.now

    def stopped_s(self) -> float:
        return 0.0

    def own_s(self) -> float:
        return Clock.now

    def busy_s(self) -> float | None:
        return None

    def preemptions(self) -> int:
        return 0


class Slow(Backend):
    """Runs graphs with torch, and takes so many times eager's time for it."""

    name = "slow"

    def __init__(self, factor: float, refused: str = "-"):
        self.factor = factor
        self.refused = refused
        self.compiled = 0
        self.ran = 0

    def availability(self) -> Availability:
        return Availability(True, "always")

    def supports(self, node: fx.Node, options: Options) -> Support:
        return Support(self.refused not in str(node.target), "refused")

    def cache_key(self, options: Options) -> str:
        return "1"

    def compile(self, graph: Graph, options: Options) -> Executable:
        self.compiled += 1
        return self.load({}, graph, options)

    def load(self, parts: Mapping[str, bytes], graph: Graph, options: Options) -> Executable:
        return Kept(graph, lambda *values: self._run(graph.module, values))

    def _run(self, module: fx.GraphModule, values: Sequence[Any]) -> Any:
        self.ran += 1
        Clock.now += (self.factor - 1) * MS
        return module(*values)


class Kept(UnfrozenExecutable):
    """Can be loaded in another process."""

    def dump(self) -> dict[str, bytes]:
        return {"nothing": b""}


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_timing, "System", Clock)
    monkeypatch.setattr(GraphReport, "compile_seconds", property(lambda _: 10.0, lambda *_: None))


def function(x: Tensor) -> Tensor:
    return (x * 2).sin() + x.cumsum(0)


def compiled(fn: Callable[..., Any], backend: Backend, **settings: Any) -> Callable[..., Any]:
    options = type(backend).Options(**{"min_block_size": 1, **settings})
    torch._dynamo.reset()
    return torch.compile(
        fn, backend=lambda gm, inputs: compile_captured(backend, gm, inputs, options)
    )


def called(
    fn: Callable[..., Any], backend: Backend, calls: int = 60, shape: int = 5, **settings: Any
) -> GraphReport:
    """Calls it and compares; returns the report of the one graph."""
    with dynamo_backends.record() as reports, torch.no_grad():
        run = compiled(fn, backend, **settings)
        for _ in range(calls):
            x = torch.randn(shape)
            torch.testing.assert_close(run(x), fn(x))
    (report,) = reports
    return report


def outcomes(report: GraphReport) -> list[tuple[str, str, bool]]:
    return [(p.region, p.outcome, p.replaced) for p in report.paces]


def test_slow_code_is_replaced_and_that_is_said_once(caplog: pytest.LogCaptureFixture):
    backend = Slow(42)
    before = dynamo_backends.counters()
    with caplog.at_level(logging.WARNING, "dynamo_backends"):
        report = called(function, backend)
    assert outcomes(report) == [("block", "slower", True)]
    assert backend.ran < 15
    (found,) = report.paces
    assert (found.slowdown, found.eager_s) == (pytest.approx(42), pytest.approx(MS))
    (text,) = [r.getMessage() for r in caplog.records]
    start = "slow: a block of the inference graph of capture "
    assert text.startswith(start)
    assert (
        "takes 42 times eager's time (42 ms, eager 1 ms): 1x aten.mul.Tensor, 1x aten.sin.default, "
        "1x aten.cumsum.default, 1x aten.add.Tensor, at "
    ) in text
    assert text.endswith("; the block runs in eager from now on. " + speed_check.REMEDY)
    assert dynamo_backends.counters()["slower"] == before["slower"] + 1
    assert report.events == [], "it is no fault"
    assert report.to_dict()["paces"][0]["outcome"] == "slower"


@pytest.mark.parametrize("factor", [0.4, 0.9, 1.04])
def test_code_that_is_fast_enough_stays_and_costs_nothing_more(factor: float):
    backend = Slow(factor)
    report = called(function, backend)
    assert outcomes(report) == [("block", "fast enough", False)]
    (block,) = report.executable.static_program.blocks
    assert block._instead is None
    assert backend.ran >= 60


def test_what_is_a_little_slower_is_not_sure():
    report = called(function, Slow(1.2), calls=250)
    assert outcomes(report) == [("block", "not sure", False)]
    assert "the difference is too small" in report.paces[0].reason


@pytest.mark.parametrize("settings", [{"slow": "report"}, {"fallback": "error"}])
def test_eager_takes_over_only_where_it_may(
    settings: dict[str, str], caplog: pytest.LogCaptureFixture
):
    backend = Slow(9)
    with caplog.at_level(logging.WARNING, "dynamo_backends"):
        report = called(function, backend, **settings)
        assert outcomes(report) == [("block", "slower", False)]
        assert backend.ran >= 60
        again = called(function, backend, **settings)
    assert outcomes(again) == [("block", "slower", False)]
    texts = [r.getMessage() for r in caplog.records]
    assert [text.count("; the compiled code stays in use. ") for text in texts] == [1, 1]
    assert again.ops_in_eager == 0


def test_nothing_is_measured_where_that_is_not_wanted():
    report = called(function, Slow(42), slow="off")
    assert report.paces == []


def test_a_later_process_runs_in_eager_without_compiling(caplog: pytest.LogCaptureFixture):
    first, later = Slow(42), Slow(42)
    called(function, first)
    with caplog.at_level(logging.WARNING, "dynamo_backends"):
        report = called(function, later, calls=2)
    assert (first.compiled, later.compiled, later.ran) == (1, 0, 0)
    reason = (
        "compiled code takes 42 times eager's time (42 ms, eager 1 ms), according to an earlier "
        "measurement"
    )
    assert {f.reason for f in report.fallbacks} == {reason}
    assert outcomes(report) == [("block", "slower", True)]
    assert reason in caplog.text
    assert called(function, Slow(42), calls=2, slow="off").blocks == 1
    assert called(function, Slow(42), calls=2, fallback="error").blocks == 1


IN_ANOTHER_PROCESS = """
from tests.test_pace import Slow, called, function, outcomes

backend = Slow(42)
report = called(function, backend, calls=2)
print(backend.compiled, outcomes(report))
"""


def test_another_process_runs_in_eager_without_compiling():
    called(function, Slow(42))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IN_ANOTHER_PROCESS],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "0 [('block', 'slower', True)]\n", done.stderr[-3000:]


def test_a_later_process_does_not_measure_again_what_is_fast_enough():
    called(function, Slow(0.5))
    report = called(function, Slow(42), calls=40)
    assert outcomes(report) == [("block", "fast enough", False)]
    assert report.paces[0].reason == "according to an earlier measurement"


@pytest.mark.parametrize("change", ["threads", "cache"])
def test_a_verdict_holds_for_its_threads_and_is_kept_with_the_cache(
    change: str, monkeypatch: pytest.MonkeyPatch
):
    called(function, Slow(42))
    settings = {"cache": False} if change == "cache" else {}
    if change == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert called(function, Slow(0.5), calls=40, **settings).paces[0].outcome == "fast enough"


def test_what_is_different_from_call_to_call_is_not_measured():
    def fn(x: Tensor) -> Tensor:
        return (x * 2).sin() + 1

    report = called(fn, Slow(42), verify="always")
    assert outcomes(report) == [("block", "not measured", False)]
    assert report.paces[0].reason == "every call is compared with eager"


def test_draws_happen_once_and_parts_that_draw_are_not_measured_together():
    def fn(x: Tensor) -> Tensor:
        return torch.rand_like(x.sin()).cos() + x.exp()

    backend = Slow(42)
    with dynamo_backends.record() as reports, torch.no_grad():
        run = compiled(fn, backend)
        for seed in range(40):
            x = torch.randn(5)
            torch.manual_seed(seed)
            expected = fn(x), torch.rand(3)
            torch.manual_seed(seed)
            torch.testing.assert_close((run(x), torch.rand(3)), expected)
    assert "slower" in {p.outcome for r in reports for p in r.paces}


def test_blocks_that_write_over_their_inputs_are_right():
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(5))
            self.total: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.total += x.sin()
            return self.total * 2

    model, backend = Counter(), Slow(42)
    with dynamo_backends.record() as reports, torch.no_grad():
        run = compiled(model, backend)
        expected = torch.zeros(5)
        for _ in range(40):
            x = torch.randn(5)
            expected += x.sin()
            torch.testing.assert_close(run(x), expected * 2)
    assert [p.outcome for p in reports[0].paces] == ["slower"]


def test_several_blocks_are_measured_together_too():
    def fn(x: Tensor) -> Tensor:
        return ((x.sin() + 1).cumsum(0) * 2).exp().cumsum(0) + 3

    report = called(fn, Slow(0.9, refused="cumsum"))
    assert [p.region for p in report.paces] == ["block"] * 3 + ["graph"]
    assert {p.outcome for p in report.paces} == {"fast enough"}


def test_a_graph_that_is_slower_as_a_whole_is_replaced_whole():
    def fn(x: Tensor) -> Tensor:
        return ((x.sin() + 1).cumsum(0) * 2).exp().cumsum(0) + 3

    backend = Slow(1.0, refused="cumsum")
    with dynamo_backends.record() as reports, torch.no_grad():
        run = compiled(fn, backend)
        x = torch.randn(5)
        run(x)
        while len(reports[0].paces) < 3:
            run(x)
        backend.factor = 9
        for _ in range(60):
            torch.testing.assert_close(run(x), fn(x))
        ran = backend.ran
        run(x)
    assert outcomes(reports[0])[-1] == ("graph", "slower", True)
    assert backend.ran == ran
    again = called(fn, Slow(9, refused="cumsum"), calls=2)
    assert again.reverted.startswith("compiled code takes ")
    assert (again.blocks, again.ops_on_backend) == (0, 0)


def test_training_graphs_are_replaced_each_for_itself():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    backend = Slow(42)
    with dynamo_backends.record() as reports:
        run = compiled(model, backend)
        for _ in range(40):
            x = torch.randn(3, 4)
            model.zero_grad()
            run(x).square().sum().backward()
            found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
            model(x).square().sum().backward()
            expected = [p.grad for p in model.parameters()]
            torch.testing.assert_close(found, expected)
    assert [(r.kind, *outcomes(r)) for r in reports] == [
        ("forward", ("block", "slower", True)),
        ("backward", ("block", "slower", True)),
    ]


def test_sizes_that_vary_are_compared_with_themselves():
    backend = Slow(42)
    with dynamo_backends.record() as reports, torch.no_grad():
        run = torch.compile(
            function,
            dynamic=True,
            backend=lambda gm, inputs: compile_captured(
                backend, gm, inputs, Options(min_block_size=1, ranges=False, max_executables=2)
            ),
        )
        for i in range(60):
            x = torch.randn(5 + i % 2)
            torch.testing.assert_close(run(x), function(x))
    assert [p.outcome for r in reports for p in r.paces] == ["slower", "slower"]


def test_code_that_fails_while_it_is_measured_is_replaced_as_ever():
    class Failing(Slow):
        def _run(self, module: fx.GraphModule, values: Sequence[Any]) -> Any:
            if self.ran == 5:
                raise RuntimeError("out of licences")
            return super()._run(module, values)

    report = called(function, Failing(42))
    assert report.runtime_fallbacks == ["RuntimeError: out of licences"]
    assert report.paces == []
    (block,) = report.executable.static_program.blocks
    assert block._paced.is_over


def test_an_error_of_eager_beside_a_call_ends_the_measurement(monkeypatch: pytest.MonkeyPatch):
    backend = Slow(42)
    with dynamo_backends.record() as reports, torch.no_grad():
        run = compiled(function, backend)
        x = torch.randn(5)
        run(x)
        (block,) = reports[0].executable.static_program.blocks

        def fail(values: Sequence[Any]) -> Any:
            raise MemoryError("no room for both")

        monkeypatch.setattr(block._paced, "_eager", fail)
        for _ in range(10):
            torch.testing.assert_close(run(x), function(x))
    assert outcomes(reports[0]) == [("block", "not measured", False)]
    assert "no room for both" in reports[0].paces[0].reason


def test_several_threads_call_it():
    backend = Slow(42)
    with dynamo_backends.record() as reports, torch.no_grad():
        run = compiled(function, backend)
        run(torch.randn(5))
        errors: list[BaseException] = []

        def work() -> None:
            try:
                for _ in range(200):
                    x = torch.randn(5)
                    with torch.no_grad():
                        torch.testing.assert_close(run(x), function(x))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    assert len(reports[0].paces) <= 1


def test_explain_shows_it():
    backend = Slow(42)

    def resolved(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_captured(backend, gm, inputs, Options(min_block_size=1))

    with torch.no_grad(), dynamo_backends.Explainer(function, backend=resolved) as call:
        for _ in range(30):
            call(torch.randn(5))
        text = str(call.explanation())
    flat = " ".join(text.split())
    assert "speed compared with eager: a block (1x aten.mul.Tensor," in flat
    assert "slower, 42 times eager's time (42 ms, eager 1 ms); it runs in eager" in flat


def test_the_slow_operator_is_found_on_request(monkeypatch: pytest.MonkeyPatch):
    class OfOne(Slow):
        def _run(self, module: fx.GraphModule, values: Sequence[Any]) -> Any:
            if "cumsum" in module.code:
                Clock.now += 41 * MS
            return module(*values)

    backend = OfOne(1)
    monkeypatch.setattr(bisection, "clock", Clock().wall_s)

    def resolved(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_captured(backend, gm, inputs, Options(min_block_size=1, cache=False))

    with torch.no_grad():
        found = dynamo_backends.explain(function, torch.randn(5), backend=resolved, slow=True)
    (noted,) = found.reports[0].paces
    assert (noted.outcome, noted.slowdown, noted.replaced) == ("slower", pytest.approx(42), False)
    start = "most of the time is spent in aten.cumsum.default, at "
    assert noted.reason.startswith(start)
    assert noted.reason.endswith(": 42.0 times eager's time (42 ms, eager 1 ms)")
    backend.ran = backend.compiled = 0
    with torch.no_grad():
        found = dynamo_backends.explain(function, torch.randn(5), backend=resolved)
    assert (found.reports[0].paces, backend.compiled) == ([], 1)


def test_autotune_races_itself():
    options: Any = get_backend("autotune").Options()
    assert options.common_settings()["slow"] == "off"


def test_wrong_values_are_refused():
    with pytest.raises(OptionError, match="'slow' of onnxrt must be one of 'eager', 'report', 'of"):
        dynamo_backends.compiler("onnxrt", slow="never")
    with pytest.raises(OptionError, match="Did you mean 'report'"):
        dynamo_backends.compiler("onnxrt", slow="reports")


def test_a_report_in_words():
    assert str(SpeedReport("block", "1x aten.sin.default", "not measured", reason="why")) == (
        "a block (1x aten.sin.default): not measured, why"
    )

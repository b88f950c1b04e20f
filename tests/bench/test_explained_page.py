"""The page of an explanation: what is measured, said and shown of each graph and block."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dynamo_backends.bench.candidate_table import calls_text
from dynamo_backends.bench.explained import (
    Timed,
    Times,
    break_even,
    gradients_too,
    measure,
    why_slower,
)
from dynamo_backends.bench.explained_page import explained_page, time_rows
from dynamo_backends.capture.explain import Explainer
from dynamo_backends.capture.explanation import Explanation, GraphExplanation
from dynamo_backends.cli import main
from dynamo_backends.interface.report import GraphReport, ServedCalls
from tests.bench import planted
from tests.bench.html import check_alone, needs_chromium, opened


class Broken(nn.Module):
    """Two graphs, and a buffer that each call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.fc(x).sin()
        if x.sum() > 1e9:
            return x
        return x.cos() * 3 + x.abs()


def explained(
    backend: object, rounds: int = 3, trains: bool = False, **options: object
) -> tuple[Explanation, Times]:
    torch.manual_seed(0)
    model, x = (nn.Linear(4, 4) if trains else Broken()), torch.randn(3, 4)
    with (
        torch.set_grad_enabled(trains),
        Explainer(model, backend=backend, options=options or None, switched=True) as call,
    ):
        runs = (lambda: model(x)), (lambda: call(x))
        eager, compiled = (gradients_too(run, call) for run in runs)
        compiled()
        return call.explanation(), measure(call, eager, compiled, rounds)


def test_each_graph_is_timed_in_eager_and_compiled():
    explanation, times = explained(planted.slow, rounds=4)
    assert [len(graph.operators) > 0 for graph in explanation.graphs] == [True, True]
    assert {len(s) for s in (times.call.eager_s, times.call.compiled_s)} == {4}
    for timed in times.graphs:
        assert timed is not None
        assert (len(timed.eager_s), len(timed.compiled_s)) == (4, 4)
        assert min(timed.compiled_s) > 0.005 > max(timed.eager_s)
        assert timed.speedup is not None
        assert timed.speedup.high < 1
    assert min(times.call.compiled_s) > 0.01, "two graphs"
    assert len(times.outside.compiled_s) == 4
    page = explained_page(explanation, times, "dynamo-backends explain")
    assert "compilation never pays off" in check_alone(page).words


def test_it_says_what_makes_a_model_slower_than_eager():
    explanation, times = explained(planted.slow, rounds=4)
    assert why_slower(explanation, times) == ()  # of its graphs nothing is known but their time
    call = Timed((0.010,) * 5, (0.020,) * 5)
    seconds = {"": 0.02, " block 1": 0.011, " eager 2": 0.004, " block 3": 0.001}
    parts = {f"a inference graph 1{name}": s for name, s in seconds.items()}
    served = ServedCalls("padded", ("x: float32[s0≤8]",), calls=3)
    report = GraphReport("a", "inference", served=(served,))
    graph = GraphExplanation("f", None, {}, 1.0, reports=(report,))
    explanation = dataclasses.replace(explanation, backend="a", graphs=(graph,))
    times = Times(call, (call,), Timed((), (0.003,) * 5), parts)
    outside, between, padded, kernels = why_slower(explanation, times)
    assert outside.startswith("15% of the time of a call is spent outside of graphs")
    assert between.startswith("20% of the time of a call is spent in operators")
    assert padded.startswith("3 calls ran with padded inputs")
    assert kernels.startswith("The programs of a take 12 ms per call, and eager's kernels take 10")
    page = check_alone(explained_page(explanation, times, "dynamo-backends explain"))
    assert kernels in page.words
    faster = dataclasses.replace(times, call=Timed(call.compiled_s, call.eager_s))
    assert why_slower(explanation, faster) == ()


def test_errors_are_those_of_compiled_code_against_float64():
    for backend, low, high in ((planted.right, 0, 1e-6), (planted.wrong, 0.04, 0.06)):
        _, times = explained(backend)
        assert len(times.errors) == 2
        for found in times.errors:
            assert found is not None
            assert low <= found.own <= high
            assert found.eager < 1e-6


def test_blocks_and_parts_in_eager_have_times_and_reasons():
    options = {"keep_in_eager": ("cos",), "min_block_size": 1, "fragmented": "keep"}
    explanation, times = explained("ts_trace", **options)
    names = [row[0][0] for row in time_rows(explanation, times)]
    assert names[0] == "a call"
    assert names[-1] == "outside of graphs"
    assert "inference block on ts_trace, 1" in names
    assert any(name.startswith("inference part in eager") for name in names)
    page = check_alone(explained_page(explanation, times, "dynamo-backends explain --x '<'"))
    assert "in eager: aten.cos.default, 1 call: the option keep_in_eager names it" in page.words
    assert "return x.cos() * 3 + x.abs()" in page.words
    assert "data-dependent branch in Broken.forward" in page.words
    assert "updated in place: self.calls" in page.words
    assert "dynamo-backends explain --x '<'" in page.words
    assert len(page.all("svg", "viewbox")) == 5, "calls, and rounds and errors of each graph"


def test_gradients_are_timed_too():
    explanation, times = explained("ts_trace", trains=True)
    assert [r.kind for r in explanation.graphs[0].reports] == ["forward", "backward"]
    assert "backward block on ts_trace, 1" in [row[0][0] for row in time_rows(explanation, times)]


def test_when_compilation_pays_off():
    assert break_even(2.0, 0.010, 0.005) == 400
    assert break_even(2.0, 0.005, 0.010) == math.inf
    assert break_even(None, 0.010, 0.005) is None
    assert [calls_text(x) for x in (1, 1e6, math.inf, None)] == [
        "1 call", "1,000,000 calls", "never", "-",
    ]  # fmt: skip


def test_graphs_switch_in_the_block_alone():
    call = Explainer(Broken(), backend=planted.right, switched=True)
    with torch.no_grad(), call:
        call(torch.randn(3, 4))
        assert len(call.switches()) == 2
    with pytest.raises(RuntimeError, match="inside the `with` block"):
        call.switches()


def test_the_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = tmp_path / "page.html"
    command = ["explain", f"{planted.__file__}:dense", "--backend", "eager", "--rounds", "2"]
    assert main([*command, "--html", str(page), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["times"]["call"]["eager_s"]) == 2
    words = check_alone(page.read_text(encoding="utf-8")).words
    assert "With eager a call of Sequential is" in words
    assert "--rounds 2 --html" in words


def test_a_page_without_times_says_what_was_captured():
    with torch.no_grad(), Explainer(Broken(), backend=planted.right) as call:
        call(torch.randn(3, 4))
    page = check_alone(explained_page(call.explanation(), None, "dynamo-backends explain"))
    assert "right compiles Broken in 2 graphs." in page.words


@needs_chromium
def test_a_browser_shows_it(tmp_path: Path):
    said = opened(explained_page(*explained(planted.wrong), "command"), tmp_path, "dark")
    assert (said["console"], said["flat"]) == ([], 0)
    assert said["wide"] <= 0

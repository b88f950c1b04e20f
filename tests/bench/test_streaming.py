"""Suites of requests: the same statuses, and what changing sizes cost."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dynamo_backends.bench import runs, sources, streaming
from dynamo_backends.bench.cells import BenchConfig, Cell, Outcome
from dynamo_backends.bench.pages import run_page
from dynamo_backends.bench.streaming import percentile
from dynamo_backends.bench.suites.generators import ARCHITECTURES
from dynamo_backends.bench.suites.streams import STREAMS, Stream, StreamCase
from dynamo_backends.bench.tables import columns
from dynamo_backends.cli import main
from tests.bench import planted
from tests.bench.html import check_alone
from tests.bench.made_up import passing, run_of

HOW = BenchConfig("traffic", rounds=3, patience_s=0.0)
SIZES = (2, 3, 5, 3)


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).sin() * 2 + 1


def dense(tokens: bool) -> Stream:
    torch.manual_seed(0)
    asked = [(torch.randn(n, 4),) for n in SIZES]

    def serve(model: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
        forward = compiled(model.forward)
        return lambda x: forward(x).argmax(-1) if tokens else forward(x)

    return Stream("dense", "4 requests", Scores(), serve, asked, tokens=tokens)


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


def told(name: str, tokens: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {}
    case = StreamCase("dense", lambda: dense(tokens))
    file = __file__ if name in globals() else planted.__file__
    cell = Cell("dense", f"{file}:{name}")
    streaming.measure_cold(case, cell, HOW, found.update)
    return found


def flipping(captured: Any, inputs: Any) -> Callable[..., Any]:
    return lambda *args: [-x for x in captured(*args)]


def rounding(captured: Any, inputs: Any) -> Callable[..., Any]:
    """In float32 it answers what float64 would not."""
    return lambda *args: [-x if x.dtype == torch.float32 else x for x in captured(*args)]


def test_a_stream_is_timed_as_a_whole_and_its_answers_one_by_one():
    found = told("right")
    assert (found["stage"], found["wrong"], found["requests"]) == ("done", 0, 4)
    assert found["graphs"] == 1 + found["recompilations"] == 2, "one for all other sizes"
    assert len(found["backend_s"]) == 3
    assert 0 < found["p50_s"] <= found["p95_s"]
    assert found["eager_p50_s"] <= found["eager_p95_s"]
    assert found["stream_cold_s"] > found["compile_cold_s"]
    outcome = Outcome.from_dict({**found, "status": "pass"})
    assert outcome.p95_s == found["p95_s"]


def test_wrong_answers_are_counted_and_nothing_is_timed():
    found = told("wrong")
    assert found["status"] == "fail_accuracy"
    assert found["wrong"] == 4
    assert found["reason"].startswith("4 of 4 answers are wrong: output 0 differs")
    assert "speedup" not in found


def test_tokens_that_rounding_changes_are_judged_in_float64():
    assert told("rounding", tokens=True)["stage"] == "done"
    wrong = told("flipping", tokens=True)
    assert wrong["status"] == "fail_accuracy"
    assert "tokens differ in float64" in wrong["reason"]


def test_executables_and_the_second_process():
    found: dict[str, Any] = {}
    case, cell = StreamCase("dense", lambda: dense(False)), Cell("dense", "ts_trace")
    streaming.measure_warm(case, cell, HOW, found.update)
    assert found["executables"] >= 2
    assert found["ops_on_backend"] > 0
    assert found["compile_warm_s"] > 0
    assert found["ops_outside"] == 0


def test_a_model_generates_in_the_suite():
    found: dict[str, Any] = {}
    case = sources.find(BenchConfig("generation", scale="test"), "gpt2")
    assert isinstance(case, StreamCase)
    cell = Cell("gpt2", f"{planted.__file__}:right")
    streaming.measure_cold(case, cell, dataclasses.replace(HOW, suite="generation"), found.update)
    assert (found["stage"], found["wrong"], found["recompilations"]) == ("done", 0, 0)


def test_the_suites_list_streams_and_architectures():
    assert [case.name for case in sources.cases(BenchConfig("traffic"))] == list(STREAMS)
    assert [case.name for case in sources.cases(BenchConfig("generation"))] == list(ARCHITECTURES)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            ["traffic", "--batch", "4"],
            "the suite traffic defines its own batch sizes",
        ),
        (["generation", "--mode", "step"], "no model of generation supports --mode step"),
        (
            ["traffic", "--backends", "export:openvino"],
            "on the CPU only, with models of one input size",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    flags: list[str], text: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["bench", *flags]) == 2
    assert text in " ".join(capsys.readouterr().err.split())


def test_cells_are_of_the_mode_that_a_stream_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
):
    seen: list[Cell] = []

    def measured(cell: Cell, how: BenchConfig) -> Outcome:
        seen.append(cell)
        return passing(1.5)

    monkeypatch.setattr(runs, "measure", measured)
    file = str(tmp_path / "run.json")
    flags = ["bench", "traffic", "--mode", "inference", "training", "--backends", "eager"]
    assert main([*flags, "--output", file]) == 0
    assert {c.model for c in seen if c.mode == "training"} == {"training"}
    assert len(seen) == len(STREAMS)


def test_columns_of_streams_are_shown_where_there_are_any():
    more = {"requests": 4, "wrong": 0, "executables": 3, "recompilations": 1, "p50_s": 0.5}
    run = run_of({("a", "x"): dataclasses.replace(passing(1.5), **more), ("b", "x"): passing(2.0)})
    names = [column.name for column in columns(run)]
    assert {"wrong", "executables", "recompilations", "p50 ms"} <= set(names)
    assert "p95 ms" not in names
    assert "recompilations" in check_alone(run_page(run)).words


def test_percentiles():
    assert percentile([3.0], 95) == 3.0
    assert percentile([float(i) for i in range(101)], 95) == 95.0

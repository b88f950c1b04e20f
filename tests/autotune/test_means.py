"""One budget for all graphs of a process: what it is spent on, and what is left to eager."""

import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends.autotune import tuner, warm_start
from dynamo_backends.autotune.candidates import Candidate
from dynamo_backends.autotune.cost_model import CostModel, GraphFeatures
from dynamo_backends.autotune.decisions import DecisionStore
from dynamo_backends.autotune.graph_budget import GraphBudget
from dynamo_backends.autotune.options import AutotuneOptions
from dynamo_backends.autotune.session import PreparedCandidate, Workload
from dynamo_backends.autotune.trial_inputs import TrialInputs
from dynamo_backends.autotune.tuner import GraphTuner, TuningResult
from dynamo_backends.autotune.tuning_subjects import TuningKey, TuningSubject
from dynamo_backends.interface.report import CandidateReport
from dynamo_backends.workers import race
from dynamo_backends.workers.budget import Budget
from dynamo_backends.workers.progress import Counts

CALL_S = {"eager": 0.01, "ts_trace": 0.005, "onnxrt": 0.004}


class Planted(TuningSubject):
    """Something that candidates compete to run.

    Args:
        key: What is known of it.
        competing: The candidates.
        build: Compiles it by a candidate of that name.
        first: Those that are tried first.
        share: Of the budget.
    """

    title = "a graph"
    key: Any = None
    competing: Any = ()

    def __init__(
        self,
        key: TuningKey,
        competing: Sequence[Candidate] = (),
        build: Callable[[str], race.Run] | None = None,
        first: Sequence[str] = (),
        share: float = 1.0,
    ):
        self.key, self.competing, self.budget_share = key, list(competing), share
        self.options = AutotuneOptions(candidates=tuple(c.name for c in competing))
        self._build, self._first = build, {name: i for i, name in enumerate(first)}

    def compile_candidate(self, candidate: Candidate) -> race.Run:
        assert self._build is not None
        return self._build(candidate.name)

    def prepare_candidate(self, candidate: Candidate, workload: Workload) -> PreparedCandidate:
        place = self._first.get(candidate.name)
        return PreparedCandidate(
            candidate.name, lambda: self.compile_candidate(candidate), early=place
        )


class Process:
    """Tunes graphs one after the other on a clock of its own.

    Args:
        patch: Puts the clock in.
        budget_s: Of all graphs.
    """

    def __init__(self, patch: pytest.MonkeyPatch, budget_s: float):
        self.now = 0.0
        patch.setattr(race, "time", SimpleNamespace(sleep=lambda s: None))
        patch.setattr(race, "running_s", lambda: self.now)
        self.budget = Budget(budget_s, clock=lambda: self.now)
        patch.setattr(tuner, "budget_of", lambda *_: self.budget)
        patch.setattr(
            TuningKey, "make_cost_model", lambda q: CostModel([], GraphFeatures(q.kind, q.ops))
        )
        self.compiled: list[tuple[str, float]] = []

    def tune(
        self,
        compile_s: float,
        *names: str,
        takes_s: float | None = None,
        reference_s: float = 0.0,
        inside: Callable[[], object] = lambda: None,
        part: float = 1.0,
        mark: str | None = None,
        first: Sequence[str] = (),
    ) -> TuningResult:
        """A graph's tuning session.

        Args:
            compile_s: Seconds that ts_trace is expected to compile for; onnxrt twice as long.
            names: Of the candidates.
            takes_s: What ts_trace really takes; by default as expected.
            reference_s: What eager takes before any candidate is compiled.
            inside: Done while a candidate is compiled.
            part: See `GraphBudget`.
            mark: Of the graph.
            first: Those that are tried first, and in any case.
        """
        names = names or ("ts_trace",)
        factors = {"ts_trace": 1.0, "onnxrt": 2.0}

        def run(name: str) -> Callable[[list[Any]], Sequence[Tensor]]:
            def call(args: list[Any]) -> Sequence[Tensor]:
                self.now += CALL_S[name]
                return [args[0] * 2]

            return call

        def build(name: str) -> Callable[[list[Any]], Sequence[Tensor]]:
            self.compiled.append((name, self.now))
            self.now += factors[name] * (compile_s if takes_s is None else takes_s)
            inside()
            return run(name)

        def workload() -> Workload:
            self.now += reference_s
            return Workload(run("eager"), None, TrialInputs([torch.ones(3)], (), ()))

        ops = round((compile_s - 0.3) / 0.01)  # what is written by hand of ts_trace
        key = TuningKey("inference", mark, ops, (), ["cpu"])
        candidates = [Candidate(name, name, "ours") for name in names]
        subject = Planted(key, candidates, build, first, part)
        return GraphTuner(subject).tune(workload, in_any_case=first)


def reasons(choice: TuningResult) -> dict[str, str]:
    return {row.name: row.reason for row in choice.candidates}


def test_the_first_graph_is_tuned_in_any_case_and_others_within_the_budget(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    process = Process(monkeypatch, 20)
    assert process.tune(50).winner == "ts_trace"
    spent, compiled = process.now, list(process.compiled)
    with caplog.at_level(logging.WARNING, "dynamo_backends"):
        for _ in range(10):
            choice = process.tune(0.5)
            assert choice.winner == "eager"
            assert reasons(choice) == {
                "eager": "",
                "ts_trace": "not tried: the budget of 20 s is spent",
            }
    assert process.compiled == compiled
    assert process.now == spent, "not even eager is called for them"
    (message,) = caplog.messages
    assert "ts_trace not tried (a graph)" in message


def test_a_process_takes_about_its_budget(monkeypatch: pytest.MonkeyPatch):
    process = Process(monkeypatch, 40)
    winners = [process.tune(6).winner for _ in range(20)]
    number = len(process.compiled)
    assert winners == ["ts_trace"] * number + ["eager"] * (20 - number)
    assert 5 <= number <= 6
    assert 30 < process.now <= 40


def test_what_is_left_is_for_those_who_fit_in(monkeypatch: pytest.MonkeyPatch):
    process = Process(monkeypatch, 20)
    process.tune(12)
    choice = process.tune(5, "onnxrt", "ts_trace")
    assert choice.winner == "ts_trace"
    assert reasons(choice)["onnxrt"].startswith("not tried: it needs about 10 s, more than")
    assert process.tune(30).winner == "eager"


def test_a_small_first_graph_leaves_a_large_second_one_its_candidate(
    monkeypatch: pytest.MonkeyPatch,
):
    process = Process(monkeypatch, 20)
    assert process.tune(1).winner == "ts_trace"
    assert process.tune(30).winner == "ts_trace", "less than half of the budget is gone"
    assert process.tune(1).winner == "eager"


def test_a_candidate_that_fails_is_none_that_is_finished(monkeypatch: pytest.MonkeyPatch):
    process = Process(monkeypatch, 1)

    def fail() -> None:
        if process.compiled[-1][0] == "onnxrt":
            raise RuntimeError("no such chip")

    choice = process.tune(5, "onnxrt", "ts_trace", inside=fail)
    assert [name for name, _ in process.compiled] == ["onnxrt", "ts_trace"]
    assert choice.winner == "ts_trace"


@pytest.mark.parametrize("fails", [False, True])
def test_winners_of_other_sizes_are_tried_whatever_is_left(
    monkeypatch: pytest.MonkeyPatch, fails: bool
):
    process = Process(monkeypatch, 10)
    process.tune(20)
    del process.compiled[:]

    def fail() -> None:
        if fails and process.compiled[-1][0] == "onnxrt":
            raise RuntimeError("not for symbols")

    order = ("onnxrt", "ts_trace")
    choice = process.tune(5, *reversed(order), inside=fail, first=order)
    assert choice.winner == order[fails]
    assert [name for name, _ in process.compiled] == list(order[: 1 + fails])
    if not fails:
        assert reasons(choice)["ts_trace"] == "not tried: the budget of 10 s is spent"


def test_those_that_were_faster_than_eager_are_ranked():
    rows = [
        CandidateReport("ts_trace", speedup=(2.0, 1.9, 2.1)),
        CandidateReport("onnxrt", "slower", speedup=(1.9, 1.8, 2.0)),
        CandidateReport("ov", "no faster", speedup=(1.01, 0.99, 1.03)),
        CandidateReport("tvm", "wrong: inf"),
        CandidateReport("eager", "slower", speedup=(1.0, 1.0, 1.0)),
    ]
    warm_start.note_ranking("a", "ts_trace", rows)
    warm_start.note_ranking("b", "eager", rows)
    assert warm_start.ranked_candidates("a") == ("ts_trace", "onnxrt")
    assert warm_start.ranked_candidates("b") == warm_start.ranked_candidates("c") == ()


def test_graphs_inside_of_the_first_one_are_tuned_in_any_case(monkeypatch: pytest.MonkeyPatch):
    process = Process(monkeypatch, 1)
    inner: list[str] = []

    def forward_and_backward() -> None:
        if not inner:
            inner.extend("?")
            inner[:] = [process.tune(5).winner, process.tune(7).winner]

    assert process.tune(5, inside=forward_and_backward).winner == "ts_trace"
    assert inner == ["ts_trace"] * 2
    assert process.tune(5).winner == "eager"


def test_a_forward_graph_leaves_its_backward_graph_a_part(monkeypatch: pytest.MonkeyPatch):
    process = Process(monkeypatch, 40)
    process.tune(25)
    forward = process.tune(5, "onnxrt", "ts_trace", part=0.5)
    text = "not tried: it needs about 10 s, more than what is left of the budget of 40 s"
    assert reasons(forward)["onnxrt"] == f"{text} after reserving time for the backward graph"
    assert process.tune(7).winner == "ts_trace"


def test_measuring_is_a_part_of_what_a_candidate_takes(monkeypatch: pytest.MonkeyPatch):
    process = Process(monkeypatch, 100)
    process.tune(80)
    monkeypatch.setitem(CALL_S, "eager", 2.0)
    choice = process.tune(15, mark="a" * 64)
    assert choice.winner == "eager"
    assert reasons(choice)["ts_trace"].startswith("not tried: it needs about 23 s, more")
    assert DecisionStore().all() == [], "the next process has a budget of its own"
    assert len(process.compiled) == 1


def test_what_was_tried_in_part_is_kept(monkeypatch: pytest.MonkeyPatch):
    process = Process(monkeypatch, 4)
    process.tune(3, "onnxrt", "ts_trace", mark="a" * 64)
    (decision,) = DecisionStore().all()
    assert decision.short_of_s == 4
    process.tune(3, "onnxrt", "ts_trace", mark="b" * 64)
    assert len(DecisionStore().all()) == 1


def test_nothing_is_spent_where_nothing_competes(monkeypatch: pytest.MonkeyPatch):
    process = Process(monkeypatch, 1)
    made = GraphTuner(Planted(TuningKey("inference", None, 1, (), ["cpu"])))
    assert made.rows_if_none_affordable(GraphBudget(process.budget), made.make_cost_model()) == ()


@pytest.mark.usefixtures("eager_seems_slow")
def test_training_with_changing_sizes_keeps_to_the_budget(counts: Counts):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2))
    compiler = dynamo_backends.compiler("autotune", candidates=("ts_trace",), budget_s=1.25e-3)
    compiled = torch.compile(model, backend=compiler, dynamic=False)
    with dynamo_backends.record() as reports:
        for size in (3, 4, 5):
            x = torch.randn(size, 6)
            torch.testing.assert_close(compiled(x), model(x))
            grads = [torch.autograd.grad(f(x).sum(), model[0].weight) for f in (compiled, model)]
            torch.testing.assert_close(*grads)
            assert counts.sessions == 3, "of the first size: the whole, forward and backward"
    assert [report.chosen for report in reports] == ["ts_trace", "ts_trace", "eager", "eager"]
    later = [row for report in reports[2:] for row in report.candidates if row.name != "eager"]
    assert {row.reason for row in later} == {"not tried: the budget of 0.00125 s is spent"}

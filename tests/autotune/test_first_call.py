"""How long the first call tunes, what it says meanwhile, and what an interruption leaves."""

import itertools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dynamo_backends.autotune import cost_model, tuner
from dynamo_backends.autotune.candidates import Candidate
from dynamo_backends.autotune.cost_model import CostModel, GraphFeatures, Prior, PriorRow
from dynamo_backends.autotune.graph_budget import graph_limit_s
from dynamo_backends.autotune.options import AutotuneOptions, default_candidates
from dynamo_backends.autotune.session import PreparedCandidate, Workload
from dynamo_backends.autotune.trial_inputs import TrialInputs
from dynamo_backends.autotune.tuner import GraphTuner, TuningResult
from dynamo_backends.autotune.tuning_subjects import TuningKey, TuningSubject
from dynamo_backends.interface.report import CandidateReport
from dynamo_backends.workers import race
from dynamo_backends.workers.budget import Budget
from dynamo_backends.workers.progress import Progress, showing
from tests.autotune.test_decisions import decision

NAMES = ("onnxrt", "ov", "openxla", "inductor")
GRAPH = GraphFeatures("inference", 10)


class Planted(TuningSubject):
    """A graph whose candidates take as long as a clock of the test says."""

    title = "a graph"
    key: Any = None
    competing: Any = ()

    def __init__(self, build: Callable[[str], race.Run], mark: str, options: AutotuneOptions):
        self.key = TuningKey("inference", mark * 64, 10, (), ["cpu"])
        self.competing = [Candidate(name, name, "torch") for name in NAMES]
        self.options, self.build_by_name = options, build

    def compile_candidate(self, candidate: Candidate) -> race.Run:
        return self.build_by_name(candidate.name)

    def prepare_candidate(self, candidate: Candidate, workload: Workload) -> PreparedCandidate:
        return PreparedCandidate(candidate.name, lambda: self.compile_candidate(candidate))


class Process:
    """Tunes one graph after the other with 120 s, on a clock of its own.

    Args:
        patch: Puts the clock in.
        compile_s: Of the candidates, expected and real.
        call_s: Of the candidates, and of eager.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        compile_s: Mapping[str, float],
        call_s: Mapping[str, float],
    ):
        self.now, self.compile_s, self.call_s = 0.0, compile_s, call_s
        self.compiled: list[str] = []
        self.interrupted_by = ""
        self.fails_at = 0  # which call of onnxrt
        patch.setattr(race, "time", SimpleNamespace(sleep=lambda s: None))
        patch.setattr(race, "running_s", lambda: self.now)
        budget = Budget(120, clock=lambda: self.now)
        patch.setattr(tuner, "budget_of", lambda *_: budget)
        rows = {n: PriorRow((s - 0.3) / 10, 1.5, 1.5, 1.5, 1.0) for n, s in compile_s.items()}
        model = CostModel([], GRAPH, Prior({"inference": rows}))
        patch.setattr(TuningKey, "make_cost_model", lambda _: model)

    def _run(self, name: str) -> race.Run:
        calls = itertools.count(1)

        def call(args: list[Any]) -> Sequence[Tensor]:
            if name == "onnxrt" and next(calls) == self.fails_at:
                raise RuntimeError("the licence has expired")
            self.now += self.call_s[name]
            return [args[0] * 2]

        return call

    def _build(self, name: str) -> race.Run:
        self.compiled.append(name)
        self.now += self.compile_s[name]
        if name == self.interrupted_by:
            raise KeyboardInterrupt
        return self._run(name)

    def subject(self, mark: str, **options: Any) -> Planted:
        return Planted(self._build, mark, AutotuneOptions(**options))

    def tune(self, mark: str, **options: Any) -> TuningResult:
        self.compiled.clear()
        workload = Workload(self._run("eager"), None, TrialInputs([torch.ones(3)], (), ()))
        return GraphTuner(self.subject(mark, **options)).tune(lambda: workload)


SECONDS = {"onnxrt": 2.0, "ov": 1.0, "openxla": 3.0, "inductor": 10.0}
FAST = {"eager": 1e-4, "onnxrt": 5e-5, "ov": 6e-5, "openxla": 9e-5, "inductor": 2e-5}
SLOW = {name: 500 * seconds for name, seconds in FAST.items()}


def test_who_was_never_fastest_competes_where_it_is_named():
    assert {"inductor", "inductor_freezing", "onnxrt", "openxla", "ov"} <= {
        *default_candidates(["cpu"])
    }
    left_out = {"tvm", "iree", "ts_trace", "ofi", "onednn_graph", "static_runtime", "ltc", "nnc"}
    assert not left_out & {*default_candidates(["cpu"]), *default_candidates(["cuda"])}
    options = AutotuneOptions.parse({"candidates": sorted(left_out)}, "autotune")
    assert options.candidates == tuple(sorted(left_out))


def test_a_graph_of_short_calls_is_tuned_for_a_short_time():
    assert graph_limit_s(0.0, 120) == 8
    assert graph_limit_s(0.01, 120) == 19
    assert graph_limit_s(0.05, 120) == graph_limit_s(9.0, 120) == 30
    assert graph_limit_s(9.0, 120, is_differentiated=True) == 90
    assert graph_limit_s(9.0, 20) == 30, "the budget itself is the limit"
    assert graph_limit_s(0.0, 1200) == 80, "who gives more has more tried"


def test_a_share_is_for_one_graph_and_what_it_consists_of():
    now = 0.0
    budget = Budget(100, clock=lambda: now)
    with budget.spending(), budget.sharing(30):
        now = 10.0
        assert (budget.left_s, budget.share_s) == (20, 30)
        with budget.sharing(5):
            now = 13.0
            assert (budget.left_s, budget.share_s) == (2, 5)
        with budget.sharing(50):
            assert (budget.left_s, budget.share_s) == (17, 30), "of the whole graph"
        now = 40.0
        assert budget.left_s == 0
    assert (budget.left_s, budget.share_s) == (60, 0)


def test_a_second_model_is_tuned_as_the_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    process = Process(monkeypatch, SECONDS, FAST)
    for mark in "abc":
        start = process.now
        with caplog.at_level(logging.INFO, "dynamo_backends"):
            result = process.tune(mark)
        assert process.now - start < 10
        assert sorted(process.compiled) == ["onnxrt", "openxla", "ov"]
        assert result.winner == "onnxrt"
        reasons = {row.name: row.reason for row in result.candidates}
        assert reasons["inductor"] == (
            "not tried: it needs about 10 s, more than what is left of the "
            "8 s that the budget of 120 s allows for this graph"
        )
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "inductor not tried within the 8 s for this graph" in caplog.text


def test_a_graph_of_long_calls_is_tuned_longer(monkeypatch: pytest.MonkeyPatch):
    process = Process(monkeypatch, SECONDS, SLOW)
    assert process.tune("a").winner == "inductor"
    assert process.compiled[:2] == ["onnxrt", "ov"], "who compiles fast gives a first answer"
    assert process.now < 30


def test_who_is_named_is_tried(monkeypatch: pytest.MonkeyPatch):
    process = Process(monkeypatch, SECONDS, FAST)
    assert process.tune("a", candidates=NAMES).winner == "inductor"


def test_the_first_compilation_of_a_process_takes_longer(monkeypatch: pytest.MonkeyPatch):
    seconds = []
    for module in ("a module that is not there", "sys"):
        monkeypatch.setattr(cost_model, "START_UP", {"inductor": (module, 9.0)})
        seconds.append(CostModel([], GRAPH).predict("inductor").compile_s)
    assert seconds[0] - seconds[1] == pytest.approx(9)


def test_a_small_graph_says_nothing_of_how_long_a_large_one_compiles(
    monkeypatch: pytest.MonkeyPatch,
):
    """Most of its compilation was the first one's imports."""
    monkeypatch.setattr(cost_model, "START_UP", {"ov": ("sys", 1.0)})
    rows = (CandidateReport("ov", "", 6.0, 0.0, 1.0, (1.0, 1.0, 1.0)), CandidateReport("openxla"))
    large = GraphFeatures("inference", 70)
    expected = CostModel([], large).predict("ov").compile_s
    for ops, at_most in ((9, 1.0), (70, 3.0)):
        past = [decision(ops=ops, candidates=rows)]
        found = CostModel(past, large).predict("ov").compile_s
        assert expected <= found <= at_most * expected


@pytest.mark.parametrize("call", range(1, 12))
def test_who_fails_in_whichever_call_loses_alone(call: int, monkeypatch: pytest.MonkeyPatch):
    process = Process(monkeypatch, SECONDS, FAST)
    process.fails_at = call
    result = process.tune("a")
    assert result.winner == "ov"
    reasons = {row.name: row.reason for row in result.candidates}
    assert reasons["onnxrt"] == "raised when it was called: RuntimeError: the licence has expired"


def test_an_interruption_keeps_what_is_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    process = Process(monkeypatch, SECONDS, SLOW)
    process.interrupted_by = "inductor"
    with pytest.raises(KeyboardInterrupt):
        process.tune("a")
    assert "among the candidates tried so far, onnxrt is the fastest for a graph" in caplog.text
    process.compiled.clear()
    kept = GraphTuner(process.subject("a")).restore_winner()
    assert kept is not None
    assert kept.winner == "onnxrt"
    assert process.compiled == ["onnxrt"]
    reasons = {row.name: row.reason for row in kept.candidates}
    assert reasons["inductor"] == "not tried: tuning was interrupted"
    longer = GraphTuner(process.subject("a", budget_s=600))
    assert longer.restore_winner() is None, "it has time for those that were not tried"


def test_an_interruption_before_anything_is_known_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    process = Process(monkeypatch, SECONDS, SLOW)
    process.interrupted_by = "onnxrt"
    with pytest.raises(KeyboardInterrupt):
        process.tune("a")
    assert "before any candidate was verified" in caplog.text
    assert GraphTuner(process.subject("a")).restore_winner() is None


# What is shown.


def test_a_line_says_who_is_compiled_how_long_and_who_is_best(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    process = Process(monkeypatch, SECONDS, FAST)
    with caplog.at_level(logging.INFO, "dynamo_backends"):
        process.tune("a")
    lines = [m for m in caplog.messages if "compiling" in m]
    assert lines[0].endswith("compiling ov (1 of 4); 8 s left")
    best = "best: ov 1.7 × eager"
    assert lines[1].endswith(f"compiling onnxrt (2 of 4), {best}; 7 s left")
    assert sum("measuring" in m for m in caplog.messages) == 1, "not one for each round"


def test_a_notebook_has_a_bar(monkeypatch: pytest.MonkeyPatch):
    shown: list[str] = []

    class Bar:
        def __init__(self, **_: Any):
            pass

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *_: object) -> None:
            shown.append("closed")

        def set_description_str(self, text: str) -> None:
            shown.append(text)

    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "tqdm.auto", SimpleNamespace(tqdm=Bar))
    with showing("a graph") as progress:
        progress("compiling ov", 7.4)
        assert isinstance(progress, Progress)
    assert shown == ["compiling ov; 7 s left", "closed"]

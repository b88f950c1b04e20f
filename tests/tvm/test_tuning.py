"""Tuning as a user sees it: budgets, records that are used again, interruptions."""

import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import dynamo_backends
from dynamo_backends.interface.report import GraphReport
from dynamo_backends.tvm import tuning
from dynamo_backends.tvm.records import Record, Records
from dynamo_backends.tvm.session import Settings
from dynamo_backends.tvm.tuning import records_of
from dynamo_backends.workers import budget
from dynamo_backends.workers.worker_process import ProcessLostError
from tests.checking import check
from tests.tvm.tuning_checks import FakeLaboratory, isolated, process

__all__ = ["isolated", "process"]
MeasuringProcess = type[FakeLaboratory]


class Net(nn.Module):
    """Three functions that can be tuned; the second one is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.middle = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.relu(self.first(x))
        for layer in self.middle:
            x = layer(x)
        return x.softmax(-1)


def seconds_by_kind(text: str) -> float:
    """Of the functions of `Net`, so that they cost 2, 6 and 1 in a call."""
    return 1.0 if "exp" in text else 2.0 if "max" in text else 3.0


def compiled(model: nn.Module | None = None, **options: Any) -> GraphReport:
    """Compiles a net, compares it with eager, and returns the report."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Net().eval() if model is None else model
    options.setdefault("num_threads", 1)
    with torch.no_grad():
        (report,) = check(net, torch.randn(4, 12), backend="tvm", **options)
    return report


def kept() -> list[Record]:
    records = records_of(1)
    found = [records.get(path.stem) for path in records.folder.glob("*.bin")]
    return [record for record in found if record is not None]


def test_the_real_process(isolated: None, monkeypatch: pytest.MonkeyPatch):
    report = compiled(tune_trials=3)
    assert tuning.COUNTS.trials == 3
    assert tuning.COUNTS.lost == 0
    records = kept()
    assert sum(r.trials for r in records) == 3
    assert {r.goal for r in records} == {3}
    assert report.tuned == sum(r.trace is not None for r in records)

    class Forbidden:
        def __init__(self) -> None:
            raise AssertionError("nothing is left to be tuned")

    monkeypatch.setattr(tuning, "MeasuringProcess", Forbidden)
    again = compiled(tune_trials=3)
    assert (again.cache_hits, again.tuned) == (0, report.tuned)
    assert compiled(tune_trials=3).cache_hits == 1
    assert tuning.COUNTS.trials == 3


@pytest.mark.parametrize("kind", ["tile", "rules"])
def test_what_is_known_is_used_without_tuning_and_a_second_time_nothing_is_measured(
    process: MeasuringProcess, kind: str
):
    process.kind = kind
    before = compiled()
    assert before.tuned == 0
    assert compiled().cache_hits == 1
    # A softmax has no tiles.
    expected = 2 if kind == "tile" else 3
    tuned = compiled(tune_trials=6)
    assert (tuned.tuned, tuned.cache_hits) == (expected, 0)
    assert tuning.COUNTS.functions == 3
    trials = tuning.COUNTS.trials
    for report in (compiled(tune_trials=6), compiled()):  # what was compiled before is not used
        assert (report.tuned, report.cache_hits) == (expected, 0)
    for report in (compiled(tune_trials=6), compiled()):
        assert (report.tuned, report.cache_hits) == (expected, 1)
    assert tuning.COUNTS.trials == trials


def test_the_report_tells(process: MeasuringProcess):
    compiled(tune_trials=6)
    torch._dynamo.reset()
    compiler = dynamo_backends.compiler("tvm", num_threads=1)
    with torch.no_grad():
        explanation = dynamo_backends.explain(Net().eval(), torch.randn(4, 12), backend=compiler)
    assert "3 fused functions with a tuned schedule" in str(explanation)


def test_the_costliest_function_comes_first_and_gets_most_trials(process: MeasuringProcess):
    process.seconds = staticmethod(seconds_by_kind)
    compiled(tune_trials=9)
    attempts = [mark for do, mark in process.asked if do == "attempt"]
    order = list(dict.fromkeys(attempts))
    assert [attempts.count(mark) for mark in order] == [6, 2, 1]
    assert tuning.COUNTS.trials == 9


def test_trials_are_at_most_as_many_as_wanted(process: MeasuringProcess):
    compiled(tune_trials=2)
    assert tuning.COUNTS.trials == 2
    assert sorted(r.trials for r in kept()) == [0, 1, 1]
    compiled(tune_trials=2)
    assert tuning.COUNTS.trials == 2


def test_time_is_shared_and_ends(process: MeasuringProcess, monkeypatch: pytest.MonkeyPatch):
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(budget, "time", clock)
    process.seconds = staticmethod(seconds_by_kind)

    def on_attempt(number: int) -> None:
        clock.now += 10

    process.on_attempt = staticmethod(on_attempt)
    compiled(tune_trials=1000, tune_budget_s=90)
    attempts = [mark for do, mark in process.asked if do == "attempt"]
    assert [attempts.count(mark) for mark in dict.fromkeys(attempts)] == [6, 2, 1]
    assert {r.goal for r in kept()} == {0}  # all were cut short
    compiled(tune_trials=1000, tune_budget_s=90)
    assert tuning.COUNTS.trials == 9  # this process has no time left


def test_ctrl_c_ends_tuning_and_keeps_what_was_found(
    process: MeasuringProcess, caplog: pytest.LogCaptureFixture
):
    def on_attempt(number: int) -> None:
        if number == 5:
            raise KeyboardInterrupt

    process.on_attempt = staticmethod(on_attempt)
    process.seconds = staticmethod(seconds_by_kind)
    report = compiled(tune_trials=6)
    assert report.tuned == 1
    assert len(kept()) == 1
    assert "tuning was interrupted after 1 of 3 functions" in caplog.text
    assert compiled(tune_trials=6).tuned == 1
    assert tuning.COUNTS.trials == 5


@pytest.mark.long
def test_ctrl_c_keeps_what_was_found_for_the_function_at_hand(process: MeasuringProcess):
    def on_attempt(number: int) -> None:
        if number == 3:
            raise KeyboardInterrupt

    process.on_attempt = staticmethod(on_attempt)
    assert compiled(tune_trials=12).tuned == 1
    (record,) = kept()
    assert (record.trials, record.goal) == (3, 0)
    assert tuning.COUNTS.trials == 3


def test_a_second_ctrl_c_ends_tuning_at_once(
    process: MeasuringProcess, monkeypatch: pytest.MonkeyPatch
):
    def interrupt(*_: object) -> Any:
        raise KeyboardInterrupt

    def on_attempt(number: int) -> None:
        if number == 3:
            interrupt()

    process.on_attempt = staticmethod(on_attempt)
    monkeypatch.setattr(process, "_decide", interrupt)
    assert compiled(tune_trials=12).tuned == 0
    assert kept() == []


def test_a_crash_costs_a_trial(process: MeasuringProcess):
    def on_attempt(number: int) -> None:
        if number == 2:
            raise ProcessLostError("its process ended with status -11")

    process.on_attempt = staticmethod(on_attempt)
    assert compiled(tune_trials=9).tuned == 3
    assert (tuning.COUNTS.trials, tuning.COUNTS.lost) == (9, 1)


@pytest.mark.long
def test_a_function_whose_trials_always_crash_keeps_its_default(process: MeasuringProcess):
    def on_attempt(number: int) -> None:
        raise ProcessLostError("it took more than 30 s")

    process.on_attempt = staticmethod(on_attempt)
    assert compiled(tune_trials=30).tuned == 0
    assert tuning.COUNTS.trials == 3 * tuning._LOST
    assert compiled(tune_trials=30).tuned == 0
    assert tuning.COUNTS.trials == 3 * tuning._LOST


def test_the_default_schedule_stays_where_none_is_faster(process: MeasuringProcess):
    process.faster = False
    assert compiled(tune_trials=6).tuned == 0
    assert [r.trace for r in kept()] == [None] * 3
    trials = tuning.COUNTS.trials
    assert compiled(tune_trials=6).tuned == 0
    assert tuning.COUNTS.trials == trials


@pytest.mark.long
def test_more_trials_than_before_tune_again(
    process: MeasuringProcess, monkeypatch: pytest.MonkeyPatch
):
    compiled(tune_trials=6)
    traces = {str(r.trace) for r in kept()}
    finalists: list[Any] = []
    decide = process._decide

    def watch(self: FakeLaboratory, request: dict[str, Any]) -> dict[str, Any]:
        finalists.extend(map(str, request["traces"]))
        return decide(self, request)

    monkeypatch.setattr(process, "_decide", watch)
    compiled(tune_trials=3)
    assert finalists == []
    compiled(tune_trials=7)
    assert traces <= set(finalists)  # what was known competes


def test_what_a_busy_machine_does_not_decide_is_tuned_again_later(
    process: MeasuringProcess, monkeypatch: pytest.MonkeyPatch
):
    decide = process._decide
    monkeypatch.setattr(process, "_decide", lambda *_: {"disturbed": True})
    assert compiled(tune_trials=6).tuned == 0, "default schedules are safe"
    assert all(r.trace is None and r.again_at > time.time() for r in kept())
    trials = tuning.COUNTS.trials
    monkeypatch.setattr(process, "_decide", decide)
    assert compiled(tune_trials=6).tuned == 0
    assert tuning.COUNTS.trials == trials
    monkeypatch.setattr(time, "time", lambda: max(r.again_at for r in records) + 1)
    records = kept()
    assert compiled(tune_trials=6).tuned == 3
    assert {r.again_at for r in kept()} == {0.0}


def test_a_record_that_leads_to_another_program_is_dropped(
    process: MeasuringProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    compiled(tune_trials=6)
    original = Records.get

    def other(self: Records, key: str) -> Record | None:
        record = original(self, key)
        return record and Record(record.trace, "0" * 16, goal=record.goal)

    monkeypatch.setattr(Records, "get", other)
    assert compiled(cache=False).tuned == 0
    assert "its tuning record does not fit this function" in caplog.text
    monkeypatch.undo()


def test_integers_and_views_are_not_tuned(process: MeasuringProcess):
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table((x > 0).long()).flatten(1)

    compiled(Tokens().eval(), tune_trials=6)
    assert [do for do, _ in process.asked if do == "attempt"] == []


def test_trials_of_single_calls_use_no_records(process: MeasuringProcess):
    compiled(tune_trials=6)
    module: Any = object()
    outcome = tuning.apply_tuned_schedules(module, Settings(num_threads=1, uses_records=False))
    assert (outcome.module, outcome.tuned, outcome.settled) == (module, 0, True)


def test_progress_and_the_outcome_are_told(
    process: MeasuringProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "dynamo_backends")
    said: list[str] = []

    class Showing:
        def __init__(self, title: str) -> None:
            said.append(title)

        def __enter__(self) -> Any:
            return said.append

        def __exit__(self, *_: object) -> None:
            said.append("end")

    monkeypatch.setattr(tuning, "showing", Showing)
    compiled(tune_trials=6)
    assert said[:2] == ["tvm: tuning", "tvm: tuning: timing function 1 of 3"]
    assert any("trial 2 of 3, 1.00 times as fast as the default" in line for line in said)
    assert said[-1] == "end"
    assert "tvm: 3 of 3 functions have a tuned schedule" in caplog.text

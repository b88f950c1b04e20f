"""`mode="background"`: no call waits; another process tunes, and its winner takes over."""

import logging
import os
import signal
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends import TuningStatus
from dynamo_backends.autotune import cost_model, hot_swap, tuner, tuning_thread
from dynamo_backends.autotune.decisions import DecisionStore
from dynamo_backends.autotune.tuning_thread import TuningThread
from dynamo_backends.interface.errors import OptionError
from dynamo_backends.pipeline import background
from dynamo_backends.workers.budget import Budget
from dynamo_backends.workers.progress import Counts
from tests.autotune.conftest import LONG_S
from tests.autotune.planted import Slow

OPTIONS = {"mode": "background", "candidates": ["ts_trace"]}


pytestmark = pytest.mark.usefixtures("tuning")


def compiled(fn: Callable[..., Any], *names: str, **options: Any) -> Callable[..., Any]:
    options = {"mode": "background", "candidates": names, **options}
    return torch.compile(fn, backend="autotune", options=options)


def only_status() -> TuningStatus:
    (status,) = dynamo_backends.tuning_status()
    return status


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class Gate:
    """The planted candidate `waits` compiles until `open` is called."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch):
        self._gate, self._mark = folder / "gate", folder / "mark"
        patch.setenv("PLANTED_GATE", str(self._gate))
        patch.setenv("PLANTED_MARK", str(self._mark))
        self._gate.touch()

    def open(self) -> None:
        self._gate.unlink()

    def pids(self) -> list[int]:
        """Of the processes that it was compiled in."""
        return [int(p) for p in self._mark.read_text().split()] if self._mark.exists() else []


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: ModuleType) -> Gate:
    return Gate(tmp_path, monkeypatch)


@torch.no_grad()
@pytest.mark.usefixtures("plant")
def test_the_winner_takes_over(counts: Counts, caplog: pytest.LogCaptureFixture):
    model, x = Slow(), torch.randn(40, 50)
    names = ("wrong_numbers", "crashes", "good")
    with dynamo_backends.record() as reports, caplog.at_level(logging.INFO, "dynamo_backends"):
        run = compiled(model, *names)
        torch.testing.assert_close(run(x), model(x))
        assert (reports[0].chosen, only_status().winner) == ("eager", "")
        assert counts.compiled == 0
        assert dynamo_backends.wait_for_tuning(LONG_S)
        torch.testing.assert_close(run(x), model(x))
    (report,) = reports
    assert report.backend == report.chosen == "good"
    assert report.tuning == str(only_status()) == "verified winner good runs calls"
    rows = {row.name: row for row in report.candidates}
    assert rows["crashes"].reason == "crashed with SIGSEGV in a process of its own"
    assert rows["wrong_numbers"].reason.startswith("wrong: output 0 differs from eager")
    assert rows["good"].verify_s is not None
    assert rows["good"].race_s is not None
    assert set(report.tuning_seconds) == {"capture", "reference"}
    assert (counts.sessions, counts.compiled) == (0, 1), "here the winner alone is compiled"
    said = "\n".join(caplog.messages)
    assert "autotune: inference graph" in said
    assert "tuning candidate wrong_numbers (1 of 3" in said
    (decision,) = DecisionStore().all()
    assert decision.winner == "good"
    assert decision.candidates == report.candidates
    assert decision.seconds == report.tuning_seconds


@torch.no_grad()
def test_the_first_that_is_faster_than_eager_serves_meanwhile(gate: Gate, counts: Counts):
    model, x = Slow(), torch.randn(40, 50)
    with dynamo_backends.record() as reports:
        run = compiled(model, "good", "waits")
        run(x)
        until(lambda: only_status().meanwhile)
        status = only_status()
        assert (status.state, status.candidate, status.meanwhile) == ("tuning", "waits", "good")
        assert str(status).endswith(" s used, good runs calls meanwhile)")
        assert reports[0].chosen == "good"
        torch.testing.assert_close(run(x), model(x))
        assert DecisionStore().all() == [], "nothing is decided yet"
        gate.open()
        assert dynamo_backends.wait_for_tuning(LONG_S)
    torch.testing.assert_close(run(x), model(x))
    status = only_status()
    assert status.meanwhile == ""
    assert status.winner == reports[0].chosen == DecisionStore().all()[0].winner
    assert counts.compiled == (1 if status.winner in ("good", "eager") else 2)
    assert {row.name for row in reports[0].candidates} == {"eager", "good", "waits"}


@pytest.mark.long
@torch.no_grad()
def test_one_that_fails_here_does_not_serve_meanwhile(plant: ModuleType, gate: Gate):
    model, x = Slow(), torch.randn(40, 50)
    plant.state["broken"] = True  # in this process alone
    with dynamo_backends.record() as reports:
        run = compiled(model, "good", "waits")
        run(x)
        until(gate.pids)
        assert background.wait_until_idle(LONG_S)
        assert (only_status().meanwhile, reports[0].chosen) == ("", "eager")
        torch.testing.assert_close(run(x), model(x))
        gate.open()
        assert dynamo_backends.wait_for_tuning(LONG_S)
    torch.testing.assert_close(run(x), model(x))


@torch.no_grad()
@pytest.mark.usefixtures("plant")
def test_an_earlier_decision_is_loaded_beside_the_calls(counts: Counts, tuning: TuningThread):
    model, x = Slow(), torch.randn(40, 50)
    options = {"candidates": ["good"], "isolate": "off"}
    torch.compile(model, backend="autotune", options=options)(x)
    assert counts.sessions == 1
    torch._dynamo.reset()
    run = compiled(model, "good")
    torch.testing.assert_close(run(x), model(x))
    assert dynamo_backends.wait_for_tuning(LONG_S)
    torch.testing.assert_close(run(x), model(x))
    assert only_status().winner == "good"
    assert (counts.sessions, counts.remembered) == (1, 1)
    assert not tuning._process.running


@pytest.mark.long
@torch.no_grad()
def test_a_winner_that_fails_here_does_not_serve(plant: ModuleType):
    model, x = Slow(), torch.randn(40, 50)
    plant.state["broken"] = True  # in this process alone
    run = compiled(model, "good")
    run(x)
    assert dynamo_backends.wait_for_tuning(LONG_S)
    status = only_status()
    assert status.state == "gave up"
    assert status.reason == (
        "good was verified while tuning, but failed: RuntimeError: the licence has expired"
    )
    assert DecisionStore().all() == []
    torch.testing.assert_close(run(x), model(x))


@torch.no_grad()
@pytest.mark.usefixtures("plant")
def test_the_first_call_compiles_one_that_takes_no_longer_than_it_may(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(cost_model, "START_UP", {"good": ("a module that is not there", 100.0)})
    with dynamo_backends.record() as reports:
        compiled(Slow(), "good", "wrong_elsewhere", first_call_s=50)(torch.randn(40, 50))
        assert reports[0].chosen == "wrong_elsewhere"


@torch.no_grad()
def test_a_winner_that_fails_in_a_call_serves_no_longer(plant: ModuleType):
    model, x = Slow(), torch.randn(40, 50)
    with dynamo_backends.record() as reports:
        run = compiled(model, "good", first_call_s=1000)
        torch.testing.assert_close(run(x), model(x))
    assert dynamo_backends.wait_for_tuning(LONG_S)
    plant.state["broken"] = True
    torch.testing.assert_close(run(x), model(x))
    text = "good, which autotune had chosen, failed"
    assert only_status().state == "gave up"
    assert only_status().reason == f"{text}: RuntimeError: the licence has expired"
    assert reports[0].tuning == f"gave up ({text})"


@torch.no_grad()
@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("at its start", marks=pytest.mark.long),
        "in a candidate",
        pytest.param("twice in a candidate", marks=pytest.mark.long),
    ],
)
def test_a_tuner_that_is_killed_loses_nothing(moment: str, tuning: TuningThread, gate: Gate):
    model, x = Slow(), torch.randn(40, 50)
    run = compiled(model, "raises_at_compile", "waits", budget_s=1000)
    run(x)
    if moment == "at its start":
        until(lambda: tuning._process.running)
        assert tuning._process._child is not None
        os.kill(tuning._process._child.pid, signal.SIGKILL)
    else:
        for losses in range(2 if moment.startswith("twice") else 1):
            until(lambda n=losses: len(gate.pids()) > n)
            os.kill(gate.pids()[-1], signal.SIGKILL)
            torch.testing.assert_close(run(x), model(x))
    if moment != "twice in a candidate":
        until(lambda: len(gate.pids()) > (moment == "in a candidate"))
        assert only_status().candidate == "waits"
    gate.open()
    assert dynamo_backends.wait_for_tuning(LONG_S)
    winner = "eager" if moment.startswith("twice") else "waits"
    assert str(only_status()) == f"verified winner {winner} runs calls"
    rows = {row.name: row for row in DecisionStore().all()[0].candidates}
    assert "no such chip" in rows["raises_at_compile"].reason
    if winner == "eager":
        assert rows["waits"].reason == "its process was killed twice"
    torch.testing.assert_close(run(x), model(x))


DIES = textwrap.dedent("""
    import json, os, signal, sys
    for line in sys.stdin:
        request = json.loads(line)
        if "folder" in request:
            said = {"begins": ["", 1, 1], "spent_s": request["spent_s"] + 2.5}
            print(json.dumps({"said": said}), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        print("{}", flush=True)
""")


@torch.no_grad()
def test_a_tuner_that_is_lost_again_and_again_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(tuning_thread, "COMMAND", ("-S", "-c", DIES))
    monkeypatch.setattr(tuning_thread, "_thread", TuningThread())
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    run = compiled(model, "ts_trace", budget_s=20)
    run(x)
    assert dynamo_backends.wait_for_tuning(LONG_S)
    reason = "the tuning process was lost 6 times; the last time: its process ended with status -9"
    assert str(only_status()) == f"gave up ({reason})"
    assert only_status().spent_s == 6 * 2.5, "what was lost was spent"
    assert f"gave up ({reason})" in caplog.text
    torch.testing.assert_close(run(x), model(x))


@pytest.mark.long
@torch.no_grad()
def test_kills_at_random_moments(tuning: TuningThread, plant: ModuleType):
    model, x = Slow(), torch.randn(40, 50)
    run = compiled(model, "good", "wrong_numbers", "ts_trace")
    run(x)
    moments = torch.rand(10, generator=torch.Generator().manual_seed(0)) * 8
    for seconds in moments.tolist():
        until(lambda: tuning._process.running or only_status().is_settled)
        time.sleep(seconds)
        child = tuning._process._child
        if child is not None:
            os.kill(child.pid, signal.SIGKILL)
        torch.testing.assert_close(run(x), model(x))
    assert dynamo_backends.wait_for_tuning(LONG_S)
    assert only_status().winner in ("good", "") or only_status().state == "gave up"
    torch.testing.assert_close(run(x), model(x))


@torch.no_grad()
def test_a_graph_that_the_budget_does_not_suffice_for_stays_in_eager(
    monkeypatch: pytest.MonkeyPatch, tuning: TuningThread
):
    spent = Budget(20, spent_s=20, owes=False)
    monkeypatch.setattr(tuner, "budget_of", lambda *_: spent)
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    with dynamo_backends.record() as reports:
        run = compiled(model, "ts_trace")
        torch.testing.assert_close(run(x), model(x))
        assert dynamo_backends.wait_for_tuning(LONG_S)
    reason = (
        "the remaining budget of 20 s is too short for any candidate; raise the option budget_s"
    )
    assert reports[0].tuning == str(only_status()) == f"gave up ({reason})"
    rows = {row.name: row.reason for row in reports[0].candidates}
    assert rows == {"eager": "", "ts_trace": "not tried: the budget of 20 s is spent"}
    assert not tuning._process.running
    assert DecisionStore().all() == []


@torch.no_grad()
def test_what_hangs_is_ended(gate: Gate):
    run = compiled(Slow(), "waits", trial_timeout_s=1)
    run(torch.randn(40, 50))
    assert dynamo_backends.wait_for_tuning(LONG_S)
    assert str(only_status()) == "verified winner eager runs calls"
    (row,) = (r for r in DecisionStore().all()[0].candidates if r.name == "waits")
    assert row.reason == "did not finish within 1 s in a process of its own"


@pytest.mark.long
@torch.no_grad()
def test_threads_call_while_the_winner_takes_over(gate: Gate):
    model = Slow()
    run, over, wrong = compiled(model, "waits"), threading.Event(), []
    run(torch.randn(40, 50))

    def call(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        while not over.is_set():
            x = torch.randn(40, 50, generator=generator)
            with torch.no_grad():
                pairs = zip(run(x), model(x), strict=True)
                wrong.extend(1 for a, b in pairs if not torch.allclose(a, b))
            time.sleep(0.01)  # eight threads leave nothing to a process of lower priority

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    gate.open()
    assert dynamo_backends.wait_for_tuning(LONG_S)
    time.sleep(0.1)
    over.set()
    for thread in threads:
        thread.join()
    assert only_status().winner == "waits"
    assert wrong == []


class Counting(nn.Module):
    """Updates a buffer in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Buffer(torch.zeros(3))
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.linear(x).relu() * self.calls


@torch.no_grad()
def test_what_a_graph_writes_is_written_once_a_call():
    model = Counting()
    run, x = compiled(model, "ts_trace"), torch.randn(2, 3)
    run(x)
    assert dynamo_backends.wait_for_tuning(LONG_S)
    torch.testing.assert_close(run(x), model.linear(x).relu() * 2)
    assert model.calls.tolist() == [2.0] * 3


@torch.library.custom_op(
    "dynamo_backends_tests::draw", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def draw(x: Tensor) -> Tensor:
    return torch.rand_like(x)


draw.register_fake(torch.empty_like)


def dropped(x: Tensor) -> Tensor:
    return draw(x) + 1


def doubled(x: Tensor) -> Tensor:
    return x * 2


REASONS: dict[str, tuple[Callable[[Tensor], Tensor], str, dict[str, Any]]] = {
    "draws": (dropped, "dynamo_backends_tests.draw.default draws random numbers", {}),
    "training": (doubled, "which cache=False disables", {"cache": False}),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_cannot_be_tuned_so_stays_in_eager(name: str, tuning: TuningThread):
    fn, reason, options = REASONS[name]
    x = torch.randn(4, 4, requires_grad=name == "training")
    run = compiled(fn, "ts_trace", **options)
    with dynamo_backends.record() as reports:
        torch.manual_seed(0)
        result, after = run(x), torch.rand(1)
        torch.manual_seed(0)
        torch.testing.assert_close(result, fn(x))
        assert dynamo_backends.wait_for_tuning(LONG_S)
    assert torch.equal(after, torch.rand(1)), "nothing draws from the user's generator"
    assert reason in reports[0].tuning
    assert reports[0].tuning == str(only_status())
    assert reports[0].chosen == "eager"
    assert only_status().state == "gave up"
    assert not tuning._process.running
    if name == "training":
        (gradient,) = torch.autograd.grad(result.sum(), [x])
        torch.testing.assert_close(gradient, torch.full_like(x, 2))


@torch.no_grad()
@pytest.mark.usefixtures("plant")
def test_the_first_call_may_compile_who_promises_most(gate: Gate, counts: Counts):
    model, x = Slow(), torch.randn(40, 50)
    with dynamo_backends.record() as reports:
        run = compiled(model, "waits", first_call_s=1000, isolate="off")
        gate.open()
        torch.testing.assert_close(run(x), model(x))
    assert reports[0].chosen == "waits"
    assert counts.compiled == 1
    assert dynamo_backends.wait_for_tuning(LONG_S)
    assert str(only_status()) == "verified winner waits runs calls"
    assert counts.compiled == 1, "what serves already is not compiled again"
    torch._dynamo.reset()
    with dynamo_backends.record() as reports:
        compiled(model, "waits", first_call_s=1000)(x)
    assert reports[0].tuning == "verified winner waits runs calls", "the decision is on disk"


def test_explain_shows_where_tuning_stands():
    with dynamo_backends.Explainer(dropped, backend="autotune", options=OPTIONS) as call:
        call(torch.ones(3))
        assert dynamo_backends.wait_for_tuning(LONG_S)
        explanation = call.explanation()
    (report,) = explanation.reports
    assert report.tuning.startswith("gave up (dynamo_backends_tests.draw")
    assert "background tuning: gave up (dynamo_backends_tests.draw" in str(explanation)


def test_what_other_processes_do_not_know_is_not_tried(
    tuning: TuningThread, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hot_swap, "is_loadable_by_name", lambda backend: False)
    with torch.no_grad():
        compiled(lambda x: x.relu() + 1, "ts_trace")(torch.randn(3))
        assert dynamo_backends.wait_for_tuning(LONG_S)
    (row,) = (r for r in DecisionStore().all()[0].candidates if r.name == "ts_trace")
    assert row.reason.startswith("not tried: the backend is registered in this process only")


def test_a_mode_that_is_none():
    with pytest.raises(OptionError) as raised:
        dynamo_backends.compiler("autotune", mode="backgroud")
    assert str(raised.value) == (
        "option 'mode' of autotune must be one of 'wait', 'background', not 'backgroud' (str). "
        "Did you mean 'background'?"
    )
    with pytest.raises(OptionError, match="'first_call_s' of autotune must be at least 0 seconds"):
        dynamo_backends.compiler("autotune", first_call_s=-1)


def test_steps_are_not_tuned_beside_calls():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(OptionError, match="mode must be 'wait', not 'background'"):
        dynamo_backends.compile_step(
            lambda x: model(x).sum(),
            model=model,
            optimizer=optimizer,
            backend="autotune",
            options={"mode": "background"},
        )


@pytest.mark.long
def test_a_graph_that_is_dropped_is_not_waited_for(gate: Gate):
    with torch.no_grad():
        compiled(Slow(), "waits")(torch.randn(40, 50))
    until(gate.pids)
    torch._dynamo.reset()
    assert dynamo_backends.wait_for_tuning(LONG_S)
    assert dynamo_backends.tuning_status() == []

"""Whole training steps: the winner compiles them in its own way."""

from typing import Any

import pytest
import torch
from torch import nn

import dynamo_backends
from dynamo_backends import GraphReport, Step
from dynamo_backends.aot.step.program.programs import (
    RUN,
    RUNS,
    STEPS,
    CopyingProgram,
    OnlineComparison,
)
from dynamo_backends.autotune.functional_subjects import TrainingStepSubject
from dynamo_backends.autotune.options import USER_FUNCTION
from dynamo_backends.autotune.tuned_step import TunedStepProgram
from dynamo_backends.inductor.steps import InductorStep
from dynamo_backends.interface.errors import DynamoBackendsError
from dynamo_backends.interface.executable import StepProgram
from dynamo_backends.interface.report import EagerEvent
from dynamo_backends.workers.progress import Counts
from dynamo_backends.workers.race import Race, Run
from dynamo_backends.xla.step_runtime import XlaStep
from tests.aot import step_nets as nets
from tests.aot.step_checks import assert_as_accurate_as_eager, assert_equal_to_eager
from tests.training.stepping import OPTIMIZERS

WAYS = {"openxla": XlaStep, "inductor": InductorStep, "ts_trace": CopyingProgram}


def train(
    *candidates: str, steps: int = 4, net: Any = nets.convnet, **options: Any
) -> tuple[Step, GraphReport]:
    """Trains a net by autotune with some candidates, compares with eager."""
    with dynamo_backends.record() as reports:
        step = assert_equal_to_eager(
            net,
            OPTIMIZERS["adamw"],
            nets.images(steps) if net is nets.convnet else nets.rows(steps),
            "autotune",
            loss_of=nets.entropy,
            options={"candidates": candidates, **options},
        )
    assert (step.launches + step.eager_steps, step.compilations) == (steps, 1)
    (report,) = reports
    return step, report


def program_of(step: Step) -> StepProgram | None:
    (program,) = step._programs.kept
    assert isinstance(program.compiled, TunedStepProgram)
    return program.compiled._program


@pytest.mark.usefixtures("eager_seems_slow")
@pytest.mark.parametrize("candidate", WAYS)
def test_the_winner_compiles_the_step_in_its_own_way(candidate: str):
    step, report = train(candidate)
    assert isinstance(program_of(step), WAYS[candidate])
    assert report.chosen == candidate
    assert {row.name for row in report.candidates} == {"eager", candidate}


@pytest.mark.usefixtures("eager_seems_slow")
@pytest.mark.parametrize("candidate", [*WAYS, "ofi", "inductor_freezing"])
def test_onednns_lstm_is_trained(candidate: str):
    """Candidates take parts of a step outside of grad mode, where ATen has no workspace."""
    with dynamo_backends.record() as reports:
        step = assert_as_accurate_as_eager(
            lambda: nn.LSTM(8, 8),
            OPTIMIZERS["adamw"],
            list(torch.randn(4, 1, 2, 5, 8)),
            "autotune",
            options={"candidates": (candidate,)},
        )
    assert (step.launches, step.eager_steps, step.compilations) == (3, 1, 1)
    assert isinstance(program_of(step), WAYS.get(candidate, CopyingProgram))
    (report,) = reports
    assert (report.chosen, report.runtime_fallbacks) == (candidate, [])


@pytest.mark.usefixtures("eager_seems_slow")
def test_the_budget_is_for_ways_of_steps_before_functional_graphs():
    _, report = train("ts_trace", "openxla", net=nets.mlp, budget_s=1e-3)
    rows = {row.name: row for row in report.candidates}
    assert report.chosen == "openxla"
    assert rows["openxla"].compile_s
    assert rows["ts_trace"].reason == "not tried: the budget of 0.001 s is spent"


def test_a_way_of_steps_that_does_not_compile_is_left_out(monkeypatch: pytest.MonkeyPatch):
    def fails(self: TrainingStepSubject, candidate: Any) -> StepProgram:
        raise ZeroDivisionError("in the vendor's code")

    monkeypatch.setattr(TrainingStepSubject, "compile_in_place_step", fails)
    step, report = train("openxla", net=nets.mlp)
    rows = {row.name: row for row in report.candidates}
    assert report.chosen == "eager"
    assert rows["openxla"].reason.startswith("could not be compiled: ZeroDivisionError")
    assert (step.launches, step.eager_steps) == (1, 3)


@pytest.mark.usefixtures("eager_seems_slow")
def test_who_refuses_to_write_over_a_step_takes_part_as_a_functional_graph(
    monkeypatch: pytest.MonkeyPatch,
):
    def refuses(self: TrainingStepSubject, candidate: Any) -> StepProgram:
        raise DynamoBackendsError("not this step")

    monkeypatch.setattr(TrainingStepSubject, "compile_in_place_step", refuses)
    step, report = train("openxla", net=nets.mlp)
    assert report.chosen == "openxla"
    assert isinstance(program_of(step), CopyingProgram)


@pytest.mark.usefixtures("eager_seems_slow")
def test_a_decision_is_found_again(counts: Counts):
    train("openxla")
    assert counts.remembered == 0
    step, report = train("openxla")
    assert counts.remembered == 1
    assert isinstance(program_of(step), XlaStep)
    assert report.chosen == "openxla"


@pytest.mark.long
@pytest.mark.usefixtures("eager_seems_slow")
def test_a_remembered_winner_that_does_not_compile_is_contested(
    counts: Counts, monkeypatch: pytest.MonkeyPatch
):
    train("ts_trace")
    compile_in_its_way = TrainingStepSubject.compile_step
    failures = iter([True])

    def fails_once(self: TrainingStepSubject, candidate: Any) -> StepProgram:
        if next(failures, False):
            raise ZeroDivisionError
        return compile_in_its_way(self, candidate)

    monkeypatch.setattr(TrainingStepSubject, "compile_step", fails_once)
    _, report = train("ts_trace")
    assert (counts.sessions, counts.remembered) == (2, 1)
    assert report.chosen == "ts_trace"


def fail_from_step(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes openxla's steps raise from a step on, but not when they are tried on copies."""
    run, run_tuned = XlaStep.__call__, TunedStepProgram.__call__
    tuned_steps: list[TunedStepProgram] = []

    def fails(self: XlaStep, inputs: Any, taken: list[Any]) -> None:
        if tuned_steps[-1].launches >= number:
            raise RuntimeError("out of memory")
        run(self, inputs, taken)

    def tracked(self: TunedStepProgram, inputs: Any, taken: list[Any]) -> None:
        tuned_steps.append(self)
        run_tuned(self, inputs, taken)

    monkeypatch.setattr(XlaStep, "__call__", fails)
    monkeypatch.setattr(TunedStepProgram, "__call__", tracked)


@pytest.mark.usefixtures("eager_seems_slow")
def test_a_winner_that_fails_later_is_replaced_in_that_step(
    counts: Counts, monkeypatch: pytest.MonkeyPatch
):
    fail_from_step(3, monkeypatch)
    step, report = train("openxla", steps=7, net=nets.mlp)
    assert isinstance(program_of(step), CopyingProgram)
    assert counts.replaced == 1
    assert report.chosen == "eager"
    text = "openxla failed in a training step: RuntimeError: out of memory"
    assert report.events == [EagerEvent("failed", "step", text)]


def test_eager_can_win():
    step, report = train("nnc", net=nets.mlp)
    assert (step.launches, step.eager_steps) == (1, 3)
    assert report.chosen == "eager"
    assert report.ops_on_backend == 0
    assert report.ops_in_eager > 0


@pytest.mark.usefixtures("eager_seems_slow")
@pytest.mark.parametrize("eager", ["slow", "fast"])
def test_the_function_itself_is_compared_on_real_steps(
    eager: str, counts: Counts, monkeypatch: pytest.MonkeyPatch
):
    note = OnlineComparison.note_seconds
    seconds = {"slow": 2.0, "fast": 0.5}[eager]
    monkeypatch.setattr(
        OnlineComparison,
        "note_seconds",
        lambda self, turn, _: note(self, turn, seconds if turn is None else 1.0),
    )
    step, report = train("openxla", steps=1 + 2 * STEPS + 3, net=nets.mlp)
    rows = {row.name: row for row in report.candidates}
    assert set(rows) == {"eager", "openxla", USER_FUNCTION}
    wins = eager == "fast"
    assert step.eager_steps == 1 + STEPS + 2 * wins
    assert report.chosen == (USER_FUNCTION if wins else "openxla")
    assert [name for name, row in rows.items() if row.chosen] == [report.chosen]
    assert "against" in rows["openxla" if wins else USER_FUNCTION].reason
    assert rows["openxla"].speedup == pytest.approx((seconds,) * 3)
    samples = counts.samples
    step, report = train("openxla", steps=4, net=nets.mlp)  # remembers
    assert counts.samples == samples
    assert (step.launches, step.eager_steps) == ((1, 3) if wins else (3, 1))
    assert report.chosen == (USER_FUNCTION if wins else "openxla")


def test_steps_are_compared_in_runs_of_which_the_first_does_not_count():
    settled: list[Any] = []
    comparison = OnlineComparison(
        lambda compiled, eager: settled.append((compiled, eager)), [[], []]
    )
    turns = []
    for _ in range(3 * STEPS):
        turn = comparison.next_program
        fresh = turns[-1:] != [turn]  # as slow as what has just taken over
        comparison.note_seconds(
            turn, 100.0 if fresh or len(turns) < 3 * RUN else {0: 2.0, 1: 1.0, None: 3.0}[turn]
        )
        turns.append(turn)
    assert turns[: 3 * RUN] == [0] * RUN + [1] * RUN + [None] * RUN
    assert turns == turns[: 3 * RUN] * RUNS
    assert settled == [([2.0, 1.0], 3.0)]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """ts_trace wins the session, and on real steps openxla is faster than that, eager slower."""
    original, note = Race._sample, OnlineComparison.note_seconds
    factors = {"eager": 1e6}

    def biased(self: Race, run: Run, repeat: int) -> float:
        names = [name for name, known in self._runs.items() if known is run]
        return original(self, run, repeat) * factors.get(names[0], 1.0)

    seconds = {None: 3.0, 0: 2.0, 1: 1.0}
    monkeypatch.setattr(Race, "_sample", biased)
    monkeypatch.setattr(
        OnlineComparison, "note_seconds", lambda self, turn, _: note(self, turn, seconds[turn])
    )


TURNS = 1 + 3 * STEPS


@pytest.mark.long
@pytest.mark.usefixtures("timed")
def test_others_with_a_way_of_their_own_take_real_steps_too():
    step, report = train("ts_trace", "openxla", steps=TURNS + 2, net=nets.mlp)
    rows = {row.name: row for row in report.candidates}
    assert report.chosen == "openxla"
    assert rows["openxla"].reason == ""
    assert rows["ts_trace"].reason == "openxla took 1e+03 ms against 2e+03 ms in training steps"
    assert isinstance(program_of(step), XlaStep)
    step, report = train("ts_trace", "openxla", net=nets.mlp)  # remembers
    assert (report.chosen, step.launches, step.eager_steps) == ("openxla", 3, 1)


@pytest.mark.usefixtures("timed")
@pytest.mark.parametrize("fails", [False, True])
def test_they_do_even_where_eager_wins_the_contest(fails: bool, monkeypatch: pytest.MonkeyPatch):
    if fails:
        fail_from_step(1, monkeypatch)
    monkeypatch.setattr(
        Race, "_sample", lambda self, run, repeat: 2.0 - (run is self._runs["eager"])
    )
    _, report = train("ts_trace", "openxla", steps=TURNS + 2, net=nets.mlp)
    assert report.chosen == ("eager" if fails else "openxla")
    assert len(report.runtime_fallbacks) == fails


@pytest.mark.long
@pytest.mark.usefixtures("timed")
def test_one_of_them_fails_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch):
    fail_from_step(1, monkeypatch)
    step, report = train("ts_trace", "openxla", steps=TURNS + 2, net=nets.mlp)
    assert report.chosen == "ts_trace"
    assert report.runtime_fallbacks == [
        "openxla failed in a training step: RuntimeError: out of memory"
    ]
    assert isinstance(program_of(step), CopyingProgram)


def wrong_loss(self: XlaStep, taken: list[Any]) -> list[Any]:
    return [x + 1e-3 for x in RIGHT["outputs"](self, taken)]


def wrong_update(self: XlaStep, inputs: Any, taken: list[Any]) -> None:
    RIGHT["__call__"](self, inputs, taken)
    inputs[self._interface.updated[0]].detach().add_(1e-3)


def writes_too_much(self: XlaStep, inputs: Any, taken: list[Any]) -> None:
    RIGHT["__call__"](self, inputs, taken)
    inputs[self._interface.others[-1]].detach().zero_()


def raises(self: XlaStep, inputs: Any, taken: list[Any]) -> None:
    raise RuntimeError("out of memory")


RIGHT: dict[str, Any] = {"outputs": XlaStep.outputs, "__call__": XlaStep.__call__}
WRONG = {
    wrong_loss: "output 0",
    wrong_update: "output 1",
    writes_too_much: "it writes to input",
    raises: "it raised RuntimeError: out of memory",
}


@pytest.mark.usefixtures("eager_seems_slow")
@pytest.mark.parametrize("planted", WRONG)
def test_steps_that_are_wrong_in_their_own_way_are_never_taken(
    planted: Any, counts: Counts, monkeypatch: pytest.MonkeyPatch
):
    method = "outputs" if planted is wrong_loss else "__call__"
    monkeypatch.setattr(XlaStep, method, planted)
    step, report = train("openxla", net=nets.mlp)
    rows = {row.name: row for row in report.candidates}
    assert report.chosen == USER_FUNCTION
    assert rows["openxla"].reason.startswith(
        f"wrong when it compiles steps natively: {WRONG[planted]}"
    )
    assert (step.launches, step.eager_steps) == (1, 3)
    verified = counts.verified
    step, report = train("openxla", net=nets.mlp)  # remembers
    assert (report.chosen, counts.verified) == (USER_FUNCTION, verified)
    assert (step.launches, step.eager_steps) == (1, 3)


@pytest.mark.usefixtures("eager_seems_slow")
def test_a_remembered_way_of_steps_is_proven_again(monkeypatch: pytest.MonkeyPatch):
    """Until real steps have decided."""
    _, report = train("openxla", net=nets.mlp)
    assert report.chosen == "openxla"
    monkeypatch.setattr(XlaStep, "outputs", wrong_loss)
    step, report = train("openxla", net=nets.mlp)
    assert report.chosen == USER_FUNCTION
    assert [row.name for row in report.candidates if row.chosen] == [USER_FUNCTION]
    assert (step.launches, step.eager_steps) == (1, 3)


@pytest.mark.long
@pytest.mark.usefixtures("timed")
def test_the_winner_can_be_wrong_in_its_own_way_and_others_go_on(monkeypatch: pytest.MonkeyPatch):
    class Spoilt(CopyingProgram):
        def outputs(self, taken: list[Any]) -> list[Any]:
            return [x + 1 for x in super().outputs(taken)]

    build = TrainingStepSubject.compile_step
    monkeypatch.setattr(
        TrainingStepSubject,
        "compile_step",
        lambda self, candidate: Spoilt(self.graph, build(self, candidate)._run),
    )
    step, report = train("ts_trace", "openxla", steps=TURNS + 2, net=nets.mlp)
    rows = {row.name: row for row in report.candidates}
    assert report.chosen == "openxla"
    assert rows["ts_trace"].reason.startswith("wrong when it compiles steps natively: output 0")
    assert isinstance(program_of(step), XlaStep)

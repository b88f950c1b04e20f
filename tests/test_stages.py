"""Where the seconds of a compilation go."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dynamo_backends
from dynamo_backends.interface import counters
from dynamo_backends.interface.counters import (
    StageClock,
    format_stage_seconds,
    time_stage,
    use_stage_clock,
)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets planted seconds pass."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def passed(seconds: float) -> None:
        now[0] += seconds

    return passed


def test_a_stage_has_its_own_seconds_and_not_those_of_others_inside(
    passes: Callable[[float], None],
):
    with use_stage_clock(StageClock()) as clock, time_stage(counters.AOT):
        passes(1)
        with time_stage(counters.PLAN):
            passes(2)
            with time_stage(counters.TRIALS):
                passes(4)
            with time_stage(counters.TRIALS):
                passes(8)
        passes(16)
    assert clock.seconds == {counters.TRIALS: 12, counters.PLAN: 2, counters.AOT: 17}


def test_a_stage_that_fails_is_counted(passes: Callable[[float], None]):
    def fail() -> None:
        with time_stage(counters.LOWERING):
            passes(3)
            raise ValueError("planted")

    with use_stage_clock(StageClock()) as clock:
        with pytest.raises(ValueError, match="planted"):
            fail()
        with time_stage(counters.LOWERING):
            passes(1)
    assert clock.seconds == {counters.LOWERING: 4}


def test_one_clock_runs_at_a_time_and_without_one_nothing_is_counted(
    passes: Callable[[float], None],
):
    with (
        use_stage_clock(StageClock()) as outer,
        use_stage_clock(StageClock()) as inner,
        time_stage(counters.PASSES),
    ):
        passes(1)
    assert inner is outer
    with time_stage(counters.PASSES):
        passes(1)
    assert outer.seconds == {counters.PASSES: 1}


def test_stages_in_words_are_in_the_order_of_the_way():
    seconds = {counters.VERIFICATION: 0.5, counters.CAPTURE: 1.234, counters.PASSES: 0.001}
    assert format_stage_seconds(seconds) == "capture 1.23, verification 0.50"
    assert format_stage_seconds({}) == ""


def test_a_report_has_them_and_explain_shows_them():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), torch.randn(2, 8)
    with torch.no_grad():
        explanation = dynamo_backends.explain(model, x, backend="onnxrt")
    (report,) = explanation.reports
    seconds: dict[str, Any] = report.stage_seconds
    expected = {
        counters.CAPTURE,
        counters.AOT,
        counters.NORMAL_FORM,
        counters.PASSES,
        counters.PLAN,
    }
    assert (
        expected | {counters.VENDOR, counters.VERIFICATION} <= set(seconds) <= set(counters.STAGES)
    )
    assert all(value >= 0 for value in seconds.values())
    assert report.to_dict()["stage_seconds"] == seconds
    assert "seconds of each stage: capture " in str(explanation)

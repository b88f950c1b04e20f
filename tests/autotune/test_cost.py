"""What is learnt from past decisions, and the budget."""

import time

import pytest

from dynamo_backends.autotune.cost_model import TABLE, CostModel, GraphFeatures
from dynamo_backends.interface.report import CandidateReport
from dynamo_backends.workers.budget import Budget
from tests.autotune.test_decisions import decision


def row(name: str, compile_s: float, speedup: float | None) -> CandidateReport:
    ratio = None if speedup is None else (speedup, speedup, speedup)
    seconds = None if speedup is None else 1 / speedup
    return CandidateReport(name, "", compile_s, 0.0, seconds, ratio)


def learnt(*rows: CandidateReport, times: int = 10, ops: int = 100) -> CostModel:
    given = (*rows, CandidateReport("openxla"))
    past = [decision(ops=100, candidates=given) for _ in range(times)]
    return CostModel(past, GraphFeatures(ops=ops))


def test_compile_time_grows_with_the_graph():
    of_100, of_300 = (learnt(row("a", 10.3, 1.5), ops=ops) for ops in (100, 300))
    assert of_100.predict("a").compile_s == pytest.approx(10.3)
    assert of_300.predict("a").compile_s == pytest.approx(30.3)


def test_compile_time_of_one_kind_of_graph_says_something_of_another():
    """A machine that is twice as slow is so for steps, too, whose calls compile faster."""
    seconds = {kind: TABLE[kind]["inductor"].compile_s for kind in ("inference", "forward", "step")}
    slow = decision(
        ops=100, candidates=(row("inductor", 0.3 + 2 * 100 * seconds["inference"], 1.5),)
    )
    for kind in seconds:
        found = CostModel([slow] * 3, GraphFeatures(kind, 1000)).predict("inductor")
        assert found.compile_s == pytest.approx(0.3 + 2 * 1000 * seconds[kind])


def test_who_won_before_is_tried_first():
    model = learnt(row("a", 1, 1.2), row("b", 1, 3.0), row("c", 1, 0.5))
    assert model.rank_candidates(["c", "a", "b"]) == ["b", "a", "c"]


def test_one_that_was_wrong_before_is_tried_last():
    model = learnt(row("a", 1, 1.2), row("wrong", 1, None))
    assert model.predict("wrong").chances == pytest.approx(2 / 12)
    assert model.rank_candidates(["wrong", "a"]) == ["a", "wrong"]


def test_one_decision_does_not_outweigh_what_is_known():
    model = learnt(row("onnxrt", 1, 0.9), times=1)
    assert 1.2 < model.predict("onnxrt").speedup < 1.5


def test_the_budget_counts_time_inside_of_time_once():
    budget = Budget(100)
    start = time.perf_counter()
    with budget.spending():
        with budget.spending():
            time.sleep(0.02)
        inside = budget.left_s
    spent = time.perf_counter() - start
    assert 0.02 <= 100 - budget.left_s <= spent
    assert inside >= budget.left_s
    time.sleep(0.01)
    assert 100 - budget.left_s <= spent

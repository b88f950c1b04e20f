"""How much may be spent, by which clock."""

import pytest

from dynamo_backends.workers.budget import Budget, cpu_s


def test_a_clock_of_its_own_and_what_was_spent_elsewhere():
    now = 5.0
    budget = Budget(10.0, spent_s=2.0, clock=lambda: now)
    with budget.spending():
        now = 8.0
        assert (budget.spent_s, budget.left_s) == (5.0, 5.0)
        with budget.spending():
            now = 9.0
    now = 100.0
    assert budget.spent_s == 6.0
    budget.spend(7.0)
    assert (budget.spent_s, budget.left_s) == (13.0, 0.0)


def test_processors_are_counted():
    start = cpu_s()
    while cpu_s() < start + 0.05:
        sum(range(10_000))
    assert cpu_s() - start == pytest.approx(0.05, abs=0.05)


def test_what_is_owed_is_what_is_begun_first():
    budget = Budget(10.0)
    with budget.spending():
        assert budget.owes
    assert budget.owes, "nothing has come of it"
    with budget.spending():
        with budget.spending():
            budget.finished()
        assert budget.owes, "what it is a part of is not ended"
    assert not budget.owes
    elsewhere = Budget(10.0, owes=True)
    elsewhere.finished()
    assert not elsewhere.owes

"""What is said of a run: pass rates, means, sentences, significance."""

import pytest

from dynamo_backends.bench.cells import Cell, Outcome
from dynamo_backends.bench.statistics import adjusted, p_of_groups, p_of_pairs
from dynamo_backends.bench.summary import headline, summaries
from tests.bench.made_up import failing, passing, run_of


def test_failures_count_and_what_eager_cannot_run_does_not():
    outcomes = {
        ("a", "x"): passing(2.0),
        ("b", "x"): passing(0.5),
        ("c", "x"): failing("fail_accuracy"),
        ("d", "x"): failing("timeout"),
        ("e", "x"): failing("eager_two_runs_differ", stage="eager"),
        ("f", "x"): failing("OOM", stage="reference"),
    }
    (found,) = summaries(run_of(outcomes))
    assert (found.passed, found.of, found.eager_failed, found.pass_rate) == (2, 4, 2, 0.5)
    assert found.speedup == pytest.approx(1.0, abs=0.02)
    assert found.lowest is not None
    assert found.lowest[0] == "b"
    assert (found.faster, found.slower) == (1, 1)
    assert (found.cold_s, found.warm_s, found.memory) == (2.0, 1.0, pytest.approx(0.75))


def test_the_headline_names_the_best_and_what_is_left():
    outcomes = {
        ("a", "eager"): passing(1.0),
        ("a", "fast"): failing(),
        ("a", "/far/away/mine.py:own"): passing(1.5),
    }
    text = headline(run_of(outcomes, left=[Cell("b", "fast")]))
    assert text == (
        "mine.py:own passes 1 of 1 models and is 1.49 times as fast as eager (inference, float32; "
        "geometric mean); fast: 0 of 1. 3 of 4 cells are measured."
    )
    many = headline(run_of({("a", f"backend_{i}"): passing(2 - 0.1 * i) for i in range(7)}))
    assert many.startswith("backend_0 passes 1 of 1")
    assert "; backend_1: 1 of 1, 1.89 times; " in many
    assert many.endswith("; 3 more in the table.")
    alone = headline(run_of({("a", "x"): Outcome("pass")}))
    assert alone == "x passes 1 of 1 models (inference, float32)."
    assert headline(run_of({})) == "Nothing has been measured yet."


def test_equal_times_are_seldom_called_different():
    called = sum(
        speedup.p < 0.05
        for seed in range(200)
        if (speedup := passing(1.0, seed).speedup) is not None
    )
    assert 2 <= called <= 20, "about one in twenty"
    found = summaries(run_of({(str(seed), "x"): passing(1.0, seed) for seed in range(200)}))[0]
    assert found.faster + found.slower <= 2, "for all models together"


def test_p_values():
    assert p_of_pairs([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == 1.0
    assert p_of_pairs([1, 2, 3, 4, 5, 6], [1.1, 2.1, 3.1, 4.1, 5.1, 6.1]) == pytest.approx(2 / 64)
    assert p_of_groups([1, 2, 3, 4], [11, 12, 13, 14]) == pytest.approx(2 / 70)
    assert adjusted([0.01, 0.5]) == pytest.approx([0.02, 0.5])
    assert adjusted([]) == []

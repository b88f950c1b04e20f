import functools
import math
import random
import time
from typing import Any

import pytest

from harness import geometric_mean, speedup, time_candidates


def test_speedup_of_known_times() -> None:
    ratio = speedup([4.0] * 9, [2.0] * 9)
    assert (ratio.value, ratio.low, ratio.high) == (2.0, 2.0, 2.0)


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    print("seed 5")
    draw = random.Random(5)
    covered = 0
    for trial in range(100):
        slow = [3 * math.exp(draw.gauss(0, 0.2)) for _ in range(25)]
        fast = [2 * math.exp(draw.gauss(0, 0.2)) for _ in range(25)]
        ratio = speedup(slow, fast, resamples=500, seed=trial)
        assert ratio.low <= ratio.value <= ratio.high
        covered += ratio.low <= 1.5 <= ratio.high
    assert 85 <= covered <= 100


def test_disturbed_rounds_cancel() -> None:
    rounds = [1.0, 1.0, 5.0, 9.0, 2.0]
    ratio = speedup([3 * t for t in rounds], rounds)
    assert ratio.value == pytest.approx(3)
    assert ratio.low == pytest.approx(3, rel=1e-9) == ratio.high


def test_compare_finds_the_faster_one() -> None:
    timings = time_candidates(
        {"slow": lambda: time.sleep(0.004), "fast": lambda: time.sleep(0.001)}, 9, pause_s=0
    )
    assert timings["slow"].speedup.value == 1
    assert timings["fast"].speedup.value > 1.5
    assert timings["fast"].median < timings["slow"].median
    assert len(timings["fast"].samples) == 9


def test_compare_interleaves_in_changing_order() -> None:
    calls: list[str] = []
    runs: dict[str, Any] = {name: functools.partial(calls.append, name) for name in "abc"}
    time_candidates(runs, 12, pause_s=0, warmup=0, lead_in=0)
    rounds = [tuple(calls[i : i + 3]) for i in range(0, 36, 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert len(set(rounds)) > 1


def test_compare_counts_calls_synchronizes_and_tells_of_rounds() -> None:
    events: list[str] = []
    time_candidates(
        {"f": lambda: events.append("f")},
        2,
        pause_s=0,
        warmup=3,
        repeat=4,
        lead_in=1,
        synchronize=lambda: events.append("s"),
        on_round=lambda: events.append("r"),
    )
    assert "".join(events) == "fff" + 2 * "fsffffsr"


def test_compare_pauses_before_each_sample() -> None:
    start = time.perf_counter()
    time_candidates({"a": int, "b": int}, 3, pause_s=0.02)
    assert time.perf_counter() - start >= 6 * 0.02


def test_compare_keeps_to_its_budget() -> None:
    def measured(budget_s: float) -> int:
        timings = time_candidates(
            {"a": lambda: time.sleep(0.002)}, 40, pause_s=0, budget_s=budget_s
        )
        return len(timings["a"].samples)

    assert measured(0) == 5
    assert 5 <= measured(0.06) < 40
    assert measured(60) == 40


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one candidate, one round"):
        time_candidates({}, 3)
    with pytest.raises(ValueError, match="baseline 'c' is not one of: a, b"):
        time_candidates({"a": int, "b": int}, 3, baseline="c")
    with pytest.raises(ValueError, match="2 rounds of the baseline but 1 of the other"):
        speedup([1.0, 2.0], [1.0])


def test_geometric_mean() -> None:
    assert geometric_mean([1, 4]) == pytest.approx(2)
    assert math.isnan(geometric_mean([]))
    with pytest.raises(ValueError, match="needs positive numbers, got 0"):
        geometric_mean([1, 0])

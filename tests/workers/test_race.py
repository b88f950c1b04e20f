"""Races with known times."""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dynamo_backends.workers.race import Race, RaceResult


def race(monkeypatch: pytest.MonkeyPatch, **times: Callable[[], float]) -> tuple[RaceResult, Race]:
    """A race among candidates whose calls take these times."""
    runs: dict[str, Any] = {name: lambda args, name=name: name for name in times}
    made = Race(runs, lambda: [], pauses=False)

    def sample(run: Any, repeat: int) -> float:
        return times[run([])]()

    monkeypatch.setattr(made, "_sample", sample)
    return made.run("eager"), made


def around(seconds: float, spread: float = 0.02, seed: int = 0) -> Callable[[], float]:
    numbers = random.Random(f"{seconds} {seed}")
    return lambda: seconds * (1 + spread * (2 * numbers.random() - 1))


def test_the_fastest_is_first_and_the_hopeless_are_not_measured(monkeypatch: pytest.MonkeyPatch):
    measured, _ = race(monkeypatch, eager=around(1.0), a=around(0.8), b=around(0.7), c=around(3))
    assert measured.order == ("b", "a", "eager", "c")
    assert measured.equal == frozenset()
    assert len(measured.timings["c"].samples) == 1
    assert measured.timings["b"].speedup.value == pytest.approx(1 / 0.7, rel=0.03)
    assert set(measured.seconds) == {"eager", "a", "b", "c"}
    assert 0 < measured.seconds["c"] < measured.seconds["a"], "it left after the warm-up calls"


def test_who_is_slower_leaves_early_and_front_runners_go_on(monkeypatch: pytest.MonkeyPatch):
    fast, near = around(0.70, 0.1), around(0.69, 0.1)
    measured, _ = race(monkeypatch, eager=around(1.0), a=around(0.9), b=fast, c=near)
    rounds = {name: len(timing.samples) for name, timing in measured.timings.items()}
    assert rounds["a"] == 7
    assert rounds["b"] == rounds["c"] > 15


def test_equal_within_a_hundredth_ends_the_race(monkeypatch: pytest.MonkeyPatch):
    a, b = around(0.500, 0.001), around(0.503, 0.001)
    measured, _ = race(monkeypatch, eager=around(1.0), a=a, b=b)
    assert measured.order[0] == "a"
    assert measured.equal == {"b"}
    assert len(measured.timings["a"].samples) == 7


def _disturbed(seconds: float) -> Iterator[float]:
    quiet = around(seconds)
    for i in range(10_000):
        yield quiet() * (20 if i in (0, 1, 5, 9) else 1)


def test_no_outlier_decides(monkeypatch: pytest.MonkeyPatch):
    disturbed = _disturbed(0.5)
    times = {"eager": around(1.0), "a": around(0.8), "b": lambda: next(disturbed)}
    measured, _ = race(monkeypatch, **times)
    assert measured.order[0] == "b"
    assert measured.timings["b"].median == pytest.approx(0.5, rel=0.03)


def test_one_that_raises_drops_out(monkeypatch: pytest.MonkeyPatch):
    calls = iter(range(100))

    def fails() -> float:
        if next(calls) == 6:
            raise RuntimeError("the sixth")
        return 0.5

    measured, _ = race(monkeypatch, eager=around(1.0), a=fails, b=around(0.9))
    assert measured.order == ("b", "eager")
    assert measured.failed == {"a": "RuntimeError: the sixth"}
    assert "a" not in measured.timings


def test_a_sample_takes_all_inputs_equally_often():
    made = iter([0, 1, 1, 1])
    seen: list[int] = []
    runs = {"eager": lambda args: seen.append(args[0]) or []}
    race = Race(runs, lambda: [next(made)], sets=4, pauses=False, least=4)  # type: ignore[arg-type]
    race.run("eager")
    assert len(seen) >= 2 * 4
    assert seen == [0, 1, 1, 1] * (len(seen) // 4)


def test_inputs_rotate():
    made = iter(range(100))
    seen: list[int] = []
    runs = {"eager": lambda args: seen.append(args[0]) or []}
    Race(runs, lambda: [next(made)], pauses=False).run("eager")  # type: ignore[arg-type]
    assert set(seen) == {0, 1, 2}
    assert all(a != b for a, b in itertools.pairwise(seen))

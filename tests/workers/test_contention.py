"""What others take, and what a race makes of it: planted clocks and loads."""

import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from dynamo_backends.workers.contention import Contention, System, Watch, is_undisturbed
from dynamo_backends.workers.race import Race, RaceResult
from tests.workers.planted_system import PlantedSystem

Sample = Callable[[int], tuple[float, bool]]
"""From the number of a sample to its seconds, and whether another process interrupted it."""


def race(
    monkeypatch: pytest.MonkeyPatch,
    others: float = 0.0,
    patience: float = 1,
    brief: bool = False,
    **candidates: Sample,
) -> RaceResult:
    """A race on a planted machine, on which others have processors all the time."""
    system = PlantedSystem()
    counts = {name: itertools.count() for name in candidates}
    runs: dict[str, Any] = {name: lambda args, name=name: name for name in candidates}
    budget_s = 60.0 if patience == 1 else 0.0
    made = Race(
        runs,
        lambda: [],
        pauses=False,
        system=system,
        budget_s=budget_s,
        patience=patience,
        brief=brief,
    )

    def sample(run: Any, repeat: int) -> float:
        name = run([])
        seconds, preempted = candidates[name](next(counts[name]))
        system.passes(seconds, others, preempted)
        return seconds

    monkeypatch.setattr(made, "_sample", sample)
    return made.run("usual")


def steady(seconds: float) -> Sample:
    return lambda number: (seconds, False)


def hogged(seconds: float, quiet_every: int, slowed: float = 10.0) -> Sample:
    """Another process interrupts all but some samples."""
    return lambda n: (seconds, False) if n % quiet_every == 0 else (seconds * slowed, True)


def test_on_a_quiet_machine_nothing_is_disturbed(monkeypatch: pytest.MonkeyPatch):
    measured = race(monkeypatch, usual=steady(0.002), other=steady(0.001))
    assert measured.order == ("other", "usual")
    assert measured.clear
    assert not measured.contention.disturbed
    assert measured.contention == Contention(0.0, measured.contention.free, 0.0, 0.0)


def test_interrupted_samples_do_not_count_if_there_are_others(monkeypatch: pytest.MonkeyPatch):
    usual, other = hogged(0.002, 2, slowed=1.1), hogged(0.001, 5, slowed=20.0)
    measured = race(monkeypatch, 1.0, usual=usual, other=other)
    assert measured.order == ("other", "usual"), "its median is ten times the usual one's"
    assert measured.timings["other"].samples == (0.001,) * len(measured.timings["other"].samples)
    assert measured.clear
    assert measured.contention.disturbed
    assert measured.contention.preempted > 0.5
    assert measured.contention.of_others == pytest.approx(1.0)


def test_a_race_without_undisturbed_samples_is_not_clear(monkeypatch: pytest.MonkeyPatch):
    def never(seconds: float) -> Sample:
        return lambda number: (seconds, True)

    measured = race(monkeypatch, 1.0, usual=never(0.002), other=never(0.001))
    assert not measured.clear
    assert measured.contention.disturbed
    assert set(measured.order) == {"usual", "other"}


def test_interruptions_while_nobody_computes_are_the_systems_own(monkeypatch: pytest.MonkeyPatch):
    """Calls of tens of milliseconds are hardly ever without one."""

    def always(seconds: float) -> Sample:
        return lambda number: (seconds, True)

    measured = race(monkeypatch, 0.0, 3, usual=always(0.03), other=always(0.02))
    assert measured.clear
    assert measured.contention.preempted == 1.0
    assert not measured.contention.disturbed
    assert len(measured.timings["other"].samples) >= 7
    assert measured.order == ("other", "usual")


def test_a_brief_race_ends_when_samples_do_not_overlap(monkeypatch: pytest.MonkeyPatch):
    def near(number: int) -> tuple[float, bool]:
        return 0.0021 + 0.0001 * (number % 2), False

    measured = race(monkeypatch, brief=True, usual=steady(0.0025), other=steady(0.002))
    assert len(measured.timings["other"].samples) == 3
    assert measured.clear
    assert measured.order == ("other", "usual")
    measured = race(monkeypatch, brief=True, usual=near, other=steady(0.002))
    assert len(measured.timings["other"].samples) >= 7
    measured = race(monkeypatch, 1.0, brief=True, usual=hogged(0.0025, 4), other=steady(0.002))
    assert len(measured.timings["other"].samples) >= 7, "interrupted samples do not count"


def test_ticks_of_a_short_race_are_no_load():
    """The system counts in hundredths of a second."""
    system = PlantedSystem()
    system.unsure_s = 0.02
    watch = Watch(system)
    system.passes(0.04, 0.5)
    assert watch.of_others() == 0.0
    system.passes(0.36, 0.5)
    assert watch.of_others() == pytest.approx(0.45)


def test_a_system_that_does_not_count_all_of_this_process_says_nothing():
    system = PlantedSystem()
    watch = Watch(system)
    system.passes(0.1)
    assert not watch.idle(), "it has not been seen for long enough"
    system.passes(0.1)
    assert watch.idle()
    system.own += 0.1
    system.others -= 0.1
    assert watch.of_others() == 0.0
    assert not watch.idle()


def test_a_lost_race_ends_early(monkeypatch: pytest.MonkeyPatch):
    def never(number: int) -> tuple[float, bool]:
        return 0.002, True

    measured = race(monkeypatch, 1.0, 3, usual=never, other=never)
    assert len(measured.timings["other"].samples) == 1
    assert not measured.clear
    measured = race(monkeypatch, 1.0, 3, usual=steady(0.001), other=hogged(0.001, 6))
    assert len(measured.timings["other"].samples) >= 7, "there is hope"


def test_a_hopeless_candidate_was_seen_undisturbed(monkeypatch: pytest.MonkeyPatch):
    def late(number: int) -> tuple[float, bool]:
        return (0.02, True) if number < 20 else (0.001, False)

    measured = race(monkeypatch, 0.2, usual=steady(0.002), other=late, slow=steady(0.02))
    assert measured.order[0] == "other", "it was interrupted in all of the first calls"
    assert len(measured.timings["slow"].samples) == 1, "it was not, and left"


def test_times_that_scatter_are_a_disturbance_that_nobody_counted(monkeypatch: pytest.MonkeyPatch):
    def scattered(number: int) -> tuple[float, bool]:
        return 0.001 * (1 + number % 3), False

    measured = race(monkeypatch, usual=steady(0.01), other=scattered)
    assert measured.contention.scattered > 0.25
    assert measured.contention.disturbed
    assert "times differed by" in str(measured.contention)


@pytest.mark.parametrize(
    ("others", "free", "disturbed"), [(1.0, 0, True), (1.0, 1, False), (0.2, 0, False)]
)
def test_others_disturb_if_they_have_more_than_is_free(others: float, free: int, disturbed: bool):
    assert Contention(of_others=others, free=free).disturbed is disturbed


def test_a_long_sample_may_be_interrupted_by_the_system_itself():
    assert is_undisturbed(0, 0.0001)
    assert not is_undisturbed(1, 0.001)
    assert is_undisturbed(3, 0.1)
    assert not is_undisturbed(20, 0.1)


def test_what_the_system_does_not_say_is_no_load():
    system = PlantedSystem()
    system.others = None
    watch = Watch(system)
    system.passes(1.0, 1.0)
    assert watch.of_others() == 0.0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc/stat")
def test_this_machine_counts():
    system = System()
    busy = system.busy_s()
    assert busy is not None
    assert busy >= sum(os.times()[:2]) - 0.1, "this process is part of it"
    assert system.preemptions() >= 0

"""Choices of good and of bad weather: planted races, clocks and disks."""

import json
from dataclasses import replace
from typing import Any

import pytest

from dynamo_backends.workers.contention import Contention
from dynamo_backends.workers.kernel_choices import AGAIN_S, Choice, Choices, decide
from dynamo_backends.workers.race import RaceResult
from tests.kernels.planted import BUSY, QUIET, Memory, outcome


class Weather:
    """Races that end as is planted.

    Attributes:
        races: How many there were.
        now: What the clock tells.
        next: The outcome of those to come.
    """

    def __init__(self) -> None:
        self.races = 0
        self.now = 0.0
        self.disk = Memory()
        self.next = outcome("fast", "usual")
        self.holds_for = "this processor"

    def process(self) -> Choices:
        """The choices of a new process."""
        return Choices(lambda: self.disk, lambda: self.holds_for, lambda: self.now)

    def ask(self, choices: Choices, kind: str = "product") -> str:
        """What is taken."""
        return choices(kind, "safe", "usual", self.race).way

    def race(self) -> RaceResult:
        """One of them."""
        self.races += 1
        return self.next


@pytest.fixture
def weather() -> Weather:
    return Weather()


def test_a_quiet_race_is_final_for_the_process_and_the_next_one(weather: Weather):
    first = weather.process()
    assert [weather.ask(first) for _ in range(2)] == ["fast", "fast"]
    weather.next = outcome("usual", "fast")
    weather.now += 1e9
    assert weather.ask(weather.process()) == "fast"
    assert weather.races == 1
    assert weather.ask(first, "another product") == "usual"
    (_, part) = (json.loads(parts["choice"]) for parts in weather.disk.values())
    assert part == {"kind": "another product", "way": "usual"}, "readable on disk"


def test_a_disturbed_race_decides_nothing_and_is_run_again(weather: Weather):
    weather.next = outcome("slow", "safe", "fast", contention=BUSY, clear=False)
    choices = weather.process()
    assert weather.ask(choices) == "safe"
    assert weather.disk == {}
    weather.now += AGAIN_S / 2
    assert weather.ask(choices) == "safe", "one graph's calls of a kind are computed alike"
    assert weather.races == 1
    weather.next = outcome("fast", "safe")
    assert weather.ask(weather.process()) == "fast", "the next process races at once"
    weather.disk.clear()
    weather.now += AGAIN_S
    assert weather.ask(choices) == "fast"
    assert weather.races == 3


def test_undisturbed_samples_decide_for_now_and_not_on_disk(weather: Weather):
    weather.next = outcome("fast", "safe", contention=BUSY)
    assert weather.ask(weather.process()) == "fast"
    weather.next = outcome("fast", "safe", contention=replace(BUSY, scattered=0.6))
    assert weather.ask(weather.process()) == "safe", "its threads waited for a processor"
    assert weather.disk == {}


def test_what_was_raced_for_something_else_does_not_hold(weather: Weather):
    weather.ask(weather.process())
    weather.holds_for = "another processor"
    weather.next = outcome("usual")
    assert weather.ask(weather.process()) == "usual"
    assert weather.races == 2


def test_choices_are_forgotten_and_found_on_disk(weather: Weather):
    choices = weather.process()
    weather.ask(choices)
    choices.forget()
    assert weather.ask(choices) == "fast"
    assert weather.races == 1


def test_the_preferred_way_is_taken_if_no_other_one_is_faster():
    measured = RaceResult({}, ("fast", "usual"), frozenset({"usual"}), {}, {})
    assert decide(measured, "safe", "usual") == Choice("usual", final=True)
    assert decide(measured, "safe", "other") == Choice("fast", final=True)


@pytest.mark.parametrize("contention", [QUIET, BUSY, Contention(scattered=1.0)], ids=str)
@pytest.mark.parametrize("clear", [True, False])
def test_only_a_quiet_race_is_final(contention: Contention, clear: bool):
    found: Any = decide(outcome("fast", contention=contention, clear=clear), "safe", "usual")
    assert found.final is (contention is QUIET)
    decides = clear and contention.even
    assert found.way == ("fast" if decides or contention is QUIET else "safe")

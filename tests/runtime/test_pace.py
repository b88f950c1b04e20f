"""The rule that says when compiled code is slower than eager, on simulated machines."""

import math
import random
from collections.abc import Callable, Iterator

import pytest

from dynamo_backends.runtime import speed_check, speed_timing
from dynamo_backends.runtime.speed_timing import FIRST_SHARE, SHARE, SpeedMeasurements, SpeedVerdict

Noise = Callable[[str, float], tuple[float, bool]]
"""From who runs, and how long on a quiet machine, to the time it takes and whether that counts."""


def quiet(rng: random.Random) -> Noise:
    """Times differ by some percent; one in 50 runs waits, and the system does not always say so."""

    def took(who: str, seconds: float) -> tuple[float, bool]:
        seconds *= rng.lognormvariate(0, 0.05)
        waits = rng.random() < 0.02
        return seconds + waits * rng.expovariate(300), not waits or rng.random() < 0.3

    return took


def uneven(rng: random.Random) -> Noise:
    """All runs take a quarter longer in the mean, some of them much."""
    return lambda who, seconds: (seconds * (1 + rng.expovariate(4)), True)


def spinning(rng: random.Random) -> Noise:
    """Threads of who ran before spin for up to 4 ms; one run in 50 takes up to ten times longer."""
    last = ""

    def took(who: str, seconds: float) -> tuple[float, bool]:
        nonlocal last
        spins, last = last != who, who
        seconds *= rng.lognormvariate(0, 0.08)
        seconds += spins * min(3 * seconds, 0.004) * rng.random()
        return seconds * (rng.uniform(1, 10) if rng.random() < 0.02 else 1), True

    return took


def loaded(rng: random.Random) -> Noise:
    """Others want all processors: a thread is preempted every 4 ms.

    Compiled code's threads also wait for each other, which the system does not count.
    """

    def took(who: str, seconds: float) -> tuple[float, bool]:
        seconds *= rng.lognormvariate(0, 0.1)
        preempted, left = 0, seconds / 0.004 - rng.expovariate(1)
        while left > 0:
            preempted, left = preempted + 1, left - rng.expovariate(1)
        seconds += sum(rng.uniform(0.001, 0.008) for _ in range(preempted))
        if who == "own" and rng.random() < 0.6:
            seconds *= rng.uniform(1.2, 3)
        return seconds, preempted <= int(seconds / 0.0125)

    return took


def preempted(rng: random.Random) -> Noise:
    """Every run of compiled code is preempted, as with threads that spin for each other."""
    times = uneven(rng)
    return lambda who, seconds: (times(who, seconds)[0], who != "own")


def run(
    factor: float, own: float, noise: Noise, first_s: float, calls: int, busy: bool = False
) -> tuple[SpeedVerdict | None, int, SpeedMeasurements]:
    """Calls code that takes `own` seconds, `factor` times eager's; returns the verdict and when."""
    measured = SpeedMeasurements(first_s)
    for call in range(1, calls + 1):
        runs, eager = measured.eager_runs_due("sizes"), (0.0, False)
        again = runs and measured.should_repeat_compiled("sizes")
        for _ in range(runs):
            eager = noise("eager", own / factor)
            measured.spent += eager[0]
        if again:
            repeated = noise("own", own)
            measured.spent += repeated[0]
            measured.note_repeat("sizes", *repeated)
        measured.note_call("sizes", *noise("own", own))
        if runs:
            measured.note_eager("sizes", *eager)
            verdict = measured.verdict(lambda: busy)
            if verdict is not None:
                return verdict, call, measured
    return None, calls, measured


OWN_S = (20e-6, 0.5e-3, 5e-3)


def outcomes(factor: float, noise: Callable[[random.Random], Noise], calls: int) -> Iterator[str]:
    for own in OWN_S:
        for seed in range(150):
            rng = random.Random(f"{factor} {own} {seed}")
            verdict, _, _ = run(factor, own, noise(rng), 1.0, calls, noise is loaded)
            yield "open" if verdict is None else verdict.outcome


@pytest.mark.parametrize("noise", [quiet, uneven, spinning, loaded, preempted])
@pytest.mark.parametrize("factor", [0.5, 0.9, 1.0, 1.05])
def test_there_is_no_false_alarm(factor: float, noise: Callable[[random.Random], Noise]):
    found = list(outcomes(factor, noise, 400))
    assert found.count("slower") == 0


@pytest.mark.parametrize("noise", [quiet, uneven, spinning])
@pytest.mark.parametrize("factor", [2.1, 3, 8, 50])
def test_what_is_twice_as_slow_is_found_within_a_hundred_calls(
    factor: float, noise: Callable[[random.Random], Noise]
):
    found = list(outcomes(factor, noise, 100))
    assert found.count("slower") >= 0.95 * len(found)


def test_what_is_much_slower_is_found_on_a_busy_machine():
    found = list(outcomes(50, loaded, 200))
    assert found.count("slower") >= 0.95 * len(found)


def test_what_is_much_slower_is_found_though_each_of_its_runs_is_preempted():
    found = list(outcomes(25, preempted, 100))
    assert found.count("slower") >= 0.95 * len(found)


@pytest.mark.parametrize("factor", [0.9, 1.2, 2, 5, 100])
@pytest.mark.parametrize("own", [20e-6, 5e-3, 0.1])
@pytest.mark.parametrize("first_s", [0.0, 0.5])
def test_runs_besides_the_calls_stay_within_their_budget(factor: float, own: float, first_s: float):
    exact: Noise = lambda who, seconds: (seconds, True)  # noqa: E731
    _, calls, measured = run(factor, own, exact, first_s, 2000)
    assert measured.budget == pytest.approx(FIRST_SHARE * first_s + SHARE * calls * own)
    assert measured.spent <= measured.budget * 1.0001


def test_code_that_is_much_slower_than_eager_is_found_at_once():
    exact: Noise = lambda who, seconds: (seconds, True)  # noqa: E731
    verdict, calls, _ = run(100, 0.05, exact, 1.0, 100)
    assert verdict == SpeedVerdict("slower", 0.05, pytest.approx(0.0005))
    assert calls <= 10
    verdict, calls, _ = run(100, 0.05, exact, 0.0, 200)
    assert verdict is not None
    assert (verdict.outcome, calls <= 150) == ("slower", True), "nothing was compiled"


def test_runs_that_were_disturbed_say_how_long_it_takes_at_most():
    measured = SpeedMeasurements(1.0)
    for _ in range(3):
        for _ in range(9):
            measured.note_call("sizes", 0.01, True)
        measured.note_eager("sizes", 0.002, False)
    assert measured.verdict(lambda: False) == SpeedVerdict("slower", 0.01, 0.002)
    other = SpeedMeasurements(1.0)
    for _ in range(3):
        for _ in range(9):
            other.note_call("sizes", 0.01, False)
        other.note_eager("sizes", 0.02, False)
    assert other.verdict(lambda: False) is None, "neither is known well"
    assert other.eager_runs_due("sizes") == 0, "no call counted"


def test_what_was_found_while_others_ran_is_not_for_other_processes():
    def verdict_of(own: float, bursts: int) -> SpeedVerdict | None:
        measured = SpeedMeasurements(1.0)
        for _ in range(bursts):
            measured.note_call("sizes", own, True)
            measured.note_eager("sizes", 1.0, True)
        return measured.verdict(lambda: True)

    assert verdict_of(9.0, 3) is None
    assert verdict_of(3.0, 11) is None
    assert verdict_of(9.0, 4) == SpeedVerdict("slower", 9.0, 1.0, speed_timing.OTHERS)
    assert verdict_of(0.3, 11) is None
    assert verdict_of(0.3, 12) == SpeedVerdict("fast enough", 0.3, 1.0, speed_timing.OTHERS)
    speed_check.store_speed_verdict("key", SpeedVerdict("slower", 9.0, 1.0, speed_timing.OTHERS))
    assert speed_check.load_speed_verdict("key") is None
    speed_check.store_speed_verdict("key", SpeedVerdict("slower", 9.0, 1.0))
    assert speed_check.load_speed_verdict("key") == SpeedVerdict("slower", 9.0, 1.0)


def test_one_burst_that_says_otherwise_delays_the_verdict():
    measured = SpeedMeasurements(1.0)
    for eager in (1.0, 1.0, 5.0, 1.0, 1.0):
        measured.note_call("sizes", 4.0, True)
        measured.note_eager("sizes", eager, True)
    assert measured.verdict(lambda: False) is None
    measured.note_call("sizes", 4.0, True)
    measured.note_eager("sizes", 1.0, True)
    assert measured.verdict(lambda: False) == SpeedVerdict("slower", 4.0, 1.0), "one in six"


def test_sizes_that_never_come_again_are_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(speed_timing, "_MOST_TIMED", 50)
    measured = SpeedMeasurements(1.0)
    for i in range(50):
        assert measured.verdict(lambda: False) is None
        assert measured.eager_runs_due(i) == 0
        measured.note_call(i, 1.0, True)
    verdict = measured.verdict(lambda: False)
    assert verdict is not None
    assert verdict.outcome == "not measured"
    assert math.isclose(measured.budget, FIRST_SHARE + SHARE * 50)

"""Finds the fastest candidate by timing in rounds, until the result is significant.

Each round times every candidate that is still in question once, in a random order, after a pause
in which threads of the one before stop spinning. Inputs rotate, so that no candidate lives off a
cache that the user's calls would not find. A candidate leaves when it is significantly slower than
the leader, and the race ends when all others have left or are equal to the leader within 1%.

Samples in which another process took a processor do not count as long as there are others
(`samples.py`), unless the system says that nobody took any; a disturbed race is longer, for the
sake of these, and says that it was disturbed.
"""

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from dynamo_backends.workers.contention import (
    Contention,
    System,
    Watch,
    free_processors,
    is_undisturbed,
)
from dynamo_backends.workers.progress import COUNTS
from dynamo_backends.workers.statistics import (
    Ratio,
    Timing,
    relative_spread,
    separate_speedup,
    speedup,
)
from dynamo_backends.workers.stopped_time import running_s

ENOUGH = 5
"""Number of undisturbed samples that suffice for a time."""

_RESAMPLES = 400


class Samples:
    """Seconds per call, one of each round.

    Attributes:
        times: All of them.
        quiet: Which of them were not disturbed by other processes.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self.quiet: list[bool] = []

    def add(self, per_call: float, seconds: float, preemptions: int) -> None:
        """Takes a sample up.

        Args:
            per_call: Seconds of one call.
            seconds: Seconds of the whole sample.
            preemptions: While it was taken.
        """
        self.times.append(per_call)
        self.quiet.append(is_undisturbed(preemptions, seconds))

    @property
    def enough(self) -> bool:
        """Returns whether there are as many undisturbed samples as are needed."""
        return sum(self.quiet) >= ENOUGH

    def usable(self) -> list[float]:
        """Undisturbed samples; all of them if these are too few."""
        return self.undisturbed() if self.enough else list(self.times)

    def undisturbed(self) -> list[float]:
        """Returns the times that were measured while no other process ran."""
        return [t for t, quiet in zip(self.times, self.quiet, strict=True) if quiet]

    def over(self, other: "Samples", least: int) -> Ratio:
        """Returns this one's time over another's.

        In the rounds in which both ran undisturbed, if these are as many as `least`; else in the
        undisturbed samples of each, if there are enough; else in all rounds in which both ran.
        """
        rounds = list(zip(self.times, other.times, self.quiet, other.quiet, strict=False))
        both = [(a, b) for a, b, *quiet in rounds if all(quiet)]
        if len(both) < least and len(both) < len(rounds):
            if self.enough and other.enough:
                return separate_speedup(self.undisturbed(), other.undisturbed(), _RESAMPLES)
            both = [(a, b) for a, b, *_ in rounds]
        first, second = zip(*both, strict=True)
        return speedup(first, second, _RESAMPLES)


Run = Callable[[list[Any]], Sequence[Any]]
"""From a list of inputs to outputs."""

EQUAL = 0.01
"""Candidates whose times differ by less than this part are equal."""

HOPELESS = 2.0
"""One that is this much slower than the best, at its best of the warm-up calls, is out."""

_WARMUP = 3  # calls, and more of them if they are short
_WARMUP_S = 0.01
_LEAST_ROUNDS = 7
_APART_ROUNDS = 3
_APART = 1.1
_MOST_ROUNDS = 60
_SHORT_S = 5e-4  # a sample of shorter calls consists of several
_MOST_REPEATS = 50
_PAUSE_S = 0.01


@dataclass(frozen=True)
class RaceResult:
    """The result of timing candidates: order, ties, failures and disturbance.

    Attributes:
        timings: One per candidate; for those that were hopeless, of the warm-up calls. `speedup`
            refers to the baseline, in the rounds in which both ran.
        order: Names, the fastest first, then by speedup.
        equal: Names of those whose difference from the fastest is not significant, or below
            `EQUAL`.
        failed: Candidates that raised, with the reason; they are in none of the others.
        seconds: How long each one was measured, pauses included; also those that failed.
        contention: What other processes did meanwhile.
        clear: Whether those who were compared to the end have enough undisturbed samples, or
            nothing disturbed the race.
    """

    timings: Mapping[str, Timing]
    order: tuple[str, ...]
    equal: frozenset[str]
    failed: Mapping[str, str]
    seconds: Mapping[str, float]
    contention: Contention = field(default_factory=Contention)
    clear: bool = True

    @property
    def sure(self) -> bool:
        """Returns whether nobody disturbed it, or there are enough undisturbed samples."""
        return self.clear or not self.contention.disturbed

    @property
    def decides(self) -> bool:
        """As `sure`, of a race so brief that undisturbed samples have to agree as well."""
        return self.sure and (self.contention.even or not self.contention.disturbed)


class Race:
    """Times candidates against each other.

    Args:
        runs: The candidates by name.
        inputs: Makes a new set of inputs.
        sets: How many sets of inputs to rotate.
        pauses: Whether to pause before each sample; without, calls follow each other.
        budget_s: No round begins later than this, but there are always enough of them.
        seed: Seed of the order in the rounds.
        least: Each sample consists of a multiple of this many calls. With the number of sets, each
            takes every set as often as the others.
        system: Counts what others do.
        brief: Whether it ends as soon as no samples overlap: the order is known then, though not
            the ratios.
        patience: Number of budgets that may pass while others disturb the race. With more than one,
            a race without any undisturbed sample ends with the first, with too few rounds.
    """

    def __init__(
        self,
        runs: Mapping[str, Run],
        inputs: Callable[[], list[Any]],
        *,
        sets: int = 3,
        pauses: bool = True,
        budget_s: float = 60,
        seed: int = 0,
        least: int = 1,
        system: System | None = None,
        patience: float = 1,
        brief: bool = False,
    ):
        self._runs = dict(runs)
        self._sets = [inputs() for _ in range(sets)]
        self._next = itertools.cycle(self._sets)
        self._pause = _PAUSE_S if pauses else 0.0
        self._budget_s = budget_s
        self._shuffler = random.Random(seed)
        self._system = system or System()
        self._patience = patience
        self._brief = brief
        self._samples = {name: Samples() for name in runs}
        self._failed: dict[str, str] = {}
        self._spent: dict[str, float] = dict.fromkeys(runs, 0.0)
        self._repeat = self._least = least
        self._watch = Watch(self._system)
        self._cuda = any(t.is_cuda for t in self._sets[0] if isinstance(t, torch.Tensor))

    def run(self, baseline: str, on_round: Callable[[], None] | None = None) -> RaceResult:
        """Runs the race until it is decided.

        Args:
            baseline: What the speedups refer to.
            on_round: Called after each round, to show progress.
        """
        start = running_s()
        self._watch = Watch(self._system)
        warm, sure = self._warm_up()
        best = min(warm.values())
        passes = max(1, min(_MOST_REPEATS, int(_SHORT_S / max(best, 1e-7))) // self._least)
        self._repeat = passes * self._least
        active = [n for n in warm if warm[n] < HOPELESS * best or n == baseline or n not in sure]
        hopeless = {n: t for n, t in warm.items() if n not in active}
        for number in range(1, _MOST_ROUNDS + 1):
            self._round(active)
            active = [n for n in active if n not in self._failed]
            if on_round is not None:
                on_round()
            seconds = running_s() - start
            if self._is_lost(active) and seconds > self._budget_s:
                break
            if self._brief and self._is_apart(active):
                break
            if number < _LEAST_ROUNDS or number % 2 == 0:
                continue
            undecided, active = self._settle(active, baseline)
            if seconds > self._budget_s * (1 if self._clear(active) else self._patience):
                break
            if not undecided and self._clear(active):
                break
        contention = self._contention(active)
        return self._measured(active, hopeless, warm[baseline], baseline, contention)

    def glance(self, name: str, within_s: float = 0.0) -> float:
        """Returns the seconds of the shortest of some calls, of a candidate that was called before.

        Args:
            name: Name of the candidate.
            within_s: After two calls, up to eight more begin within so many seconds: on a busy
                machine one of them may be undisturbed.
        """
        start, run = running_s(), self._runs[name]
        shortest = min(self._sample(run, self._least) for _ in range(2))
        for _ in range(8):
            if running_s() - start > within_s:
                break
            shortest = min(shortest, self._sample(run, self._least))
        return shortest

    def _warm_up(self) -> tuple[dict[str, float], set[str]]:
        """The shortest of each one's first calls; and for whom one of these was undisturbed."""
        found: dict[str, float] = {}
        sure = set()
        for name in list(self._runs):
            with self._spending(name):
                try:
                    times, quiet = self._first_calls(self._runs[name])
                except Exception as error:
                    self._fail(name, error)
                    continue
            found[name] = min(quiet or times)
            if quiet:
                sure.add(name)
        return found, sure

    def _first_calls(self, run: Run) -> tuple[list[float], list[float]]:
        """Seconds of all of them, and of those that were undisturbed."""
        times: list[float] = []
        quiet: list[float] = []
        while len(times) < _WARMUP or (sum(times) < _WARMUP_S and len(times) < _MOST_REPEATS):
            before = self._system.preemptions()
            times.append(self._sample(run, self._least))
            if is_undisturbed(self._system.preemptions() - before, times[-1] * self._least):
                quiet.append(times[-1])
        return times, quiet

    def _round(self, active: list[str]) -> None:
        order = list(active)
        self._shuffler.shuffle(order)
        for name in order:
            with self._spending(name):
                try:
                    time.sleep(self._pause)
                    if self._pause:
                        self._runs[name](list(next(self._next)))  # wakes threads that slept
                    before = self._system.preemptions()
                    per_call = self._sample(self._runs[name], self._repeat)
                    preemptions = self._system.preemptions() - before
                    self._samples[name].add(per_call, per_call * self._repeat, preemptions)
                except Exception as error:
                    self._fail(name, error)

    @contextmanager
    def _spending(self, name: str) -> Iterator[None]:
        start = running_s()
        try:
            yield
        finally:
            self._spent[name] += running_s() - start

    def _sample(self, run: Run, repeat: int) -> float:
        sets = [list(next(self._next)) for _ in range(repeat)]
        COUNTS.add(samples=1)
        self._synchronize()
        start = running_s()
        for args in sets:
            run(args)
        self._synchronize()
        return (running_s() - start) / repeat

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def _fail(self, name: str, error: Exception) -> None:
        self._failed[name] = f"{type(error).__name__}: {error}"
        self._samples.pop(name, None)

    def _settle(self, active: list[str], baseline: str) -> tuple[bool, list[str]]:
        """Returns whether anything is open, and who goes on; the baseline always does."""
        leader = min(active, key=self._median)
        undecided, going_on = False, []
        for name in active:
            ratio = self._against(leader, name)
            slower = ratio.high < 1
            equal = ratio.low > 1 - EQUAL
            sure = self._clear([leader, name])
            if slower and ratio.value < 1 - EQUAL and name != baseline and sure:
                continue
            going_on.append(name)
            undecided |= name != leader and not slower and not equal
        return undecided, going_on

    def _median(self, name: str) -> float:
        return statistics.median(self._samples[name].usable())

    def _against(self, leader: str, name: str) -> Ratio:
        """Returns the leader's time over another's."""
        return self._samples[leader].over(self._samples[name], _LEAST_ROUNDS)

    def _clear(self, active: Sequence[str]) -> bool:
        """Returns whether those who go on have enough samples that nobody disturbed."""
        samples = [self._samples[n] for n in active]
        if all(each.enough for each in samples) or (self._brief and self._is_apart(active)):
            return True
        return all(len(each.times) >= ENOUGH for each in samples) and self._watch.idle()

    def _is_apart(self, active: Sequence[str]) -> bool:
        """Returns whether the leader's slowest undisturbed sample is well below all others."""
        samples = {n: self._samples[n].undisturbed() for n in active}
        if min(map(len, samples.values())) < _APART_ROUNDS:
            return False
        leader = min(samples, key=lambda n: min(samples[n]))
        others = [t for n in samples if n != leader for t in samples[n]]
        return not others or max(samples[leader]) * _APART < min(others)

    def _is_lost(self, active: Sequence[str]) -> bool:
        """Returns whether a race that waits for undisturbed samples gets none."""
        if self._patience <= 1 or any(any(self._samples[n].quiet) for n in active):
            return False
        return not self._watch.idle()

    def _contention(self, active: Sequence[str]) -> Contention:
        quiet = [each for samples in self._samples.values() for each in samples.quiet]
        return Contention(
            self._watch.of_others(),
            free_processors(),
            1 - sum(quiet) / len(quiet) if quiet else 0.0,
            max((relative_spread(self._samples[n].usable()) for n in active), default=0.0),
            self._watch.idle(),
        )

    def _measured(
        self,
        active: Sequence[str],
        hopeless: Mapping[str, float],
        warm: float,
        baseline: str,
        contention: Contention,
    ) -> RaceResult:
        raced = [n for n in self._samples if n not in hopeless]
        timings = {
            n: Timing(n, tuple(self._samples[n].usable()), self._against(baseline, n))
            for n in raced
        }
        for name, seconds in hopeless.items():
            value = warm / seconds
            timings[name] = Timing(name, (seconds,), Ratio(value, value, value))
        leader = min(active, key=self._median)
        others = [n for n in timings if n != leader]
        order = [leader, *sorted(others, key=lambda n: -timings[n].speedup.value)]
        equal = {n for n in active if n != leader and self._is_equal(leader, n)}
        spent, clear = dict(self._spent), self._clear(active)
        return RaceResult(
            timings, tuple(order), frozenset(equal), dict(self._failed), spent, contention, clear
        )

    def _is_equal(self, leader: str, name: str) -> bool:
        ratio = self._against(leader, name)
        return ratio.high >= 1 or ratio.value > 1 - EQUAL

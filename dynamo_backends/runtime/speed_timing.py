"""Times compiled code against eager on the user's calls.

Calls are timed. In a few of them eager's module runs on the same inputs, in a burst before the
compiled code, and its results are dropped. Best times are compared: what others on the machine do
makes times longer, never shorter. How much slower the code has to be depends on how often that
was seen, so that noise has to repeat itself to look like slow code.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from dynamo_backends._torch_private import disable_current_modes, is_profiled
from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.interface.errors import brief_error
from dynamo_backends.interface.stance import compiles_nothing
from dynamo_backends.runtime.cache import LRU
from dynamo_backends.workers.contention import (
    System,
    Watch,
    free_processors,
    is_undisturbed,
)

SHARE = 0.03
"""Part of the time in calls that may be spent on runs besides them."""

FIRST_SHARE = 0.1
"""Part of the time of compilation that may be spent on them besides."""

SLOWER = ((2, 6.0), (3, 3.0), (5, 2.2), (7, 1.7), (10, 1.5), (12, 1.4))
"""After so many bursts code is slower that takes so many times eager's best time."""

MOST_BURSTS = 12

OTHERS = "while other processes used the CPUs"

_BUSY = 4, 4.0
"""The least bursts and factor that count where others take processors that torch's threads need."""

_OF_OTHERS = 0.25
"""Processors that others may take before that counts: the system's own work."""

_AGREES = 0.7
"""In each burst, up to one in six, the factor is at least this part of the one that is needed."""

_FAST = ((2, 0.8), (3, 1.05))
"""After so many bursts code is fast enough that takes at most so many times eager's best time."""

_BETWEEN = 3, 2
"""Calls timed before the first burst, and so many more before each next one: what disturbs may last
for a while."""

_DISTURBED = 0.5
"""How much a call with preemptions counts among those between bursts."""

_LONG_S = 0.02
"""What disturbs a run after code of another runtime (threads that spin, caches) ends sooner."""

_RUNS = 2
"""Runs of eager in a burst, of which the last one counts."""

_COLD = 4.0
"""Inputs in the processor's caches, as in a burst, do not make code faster than so many times."""

_GUESS = 2.0
"""How many times the time of compiled code eager is taken to need before it ran."""

_TIMING_S = 5e-6, 0.3e-6
"""What timing a call takes, and more for each of its inputs."""

_MOST_SIZES = 4
_MOST_TIMED = 20_000


T = TypeVar("T")


@dataclass(frozen=True)
class SpeedVerdict:
    """The outcome of timing compiled code against eager.

    Attributes:
        outcome: "slower": beyond doubt; "fast enough": it is not, or hardly; "not sure"; "not
            measured".
        own_s: Best time of compiled code.
        eager_s: Best time of eager.
        reason: Why nothing more is known.
    """

    outcome: Literal["slower", "fast enough", "not sure", "not measured"]
    own_s: float = 0.0
    eager_s: float = 0.0
    reason: str = ""


@dataclass
class _Sizes:
    """What was measured with inputs of the same sizes."""

    own: float = math.inf  # best time
    own_at_most: float = math.inf  # also of runs that were disturbed: they take longer
    eager: float = math.inf
    eager_at_most: float = math.inf
    recent: float = math.inf  # best own time since the last burst
    recent_at_most: float = math.inf
    timed: float = 0.0  # calls since the last burst; see `_DISTURBED`
    pairs: list[tuple[float, float]] = field(default_factory=list)

    @property
    def is_disturbed(self) -> bool:
        """Whether no call was without a preemption, as with runtimes whose threads spin."""
        return self.own == math.inf

    @property
    def best(self) -> float:
        """The best own time that is known."""
        return self.own_at_most if self.is_disturbed else self.own

    @property
    def factor(self) -> float:
        """At least so many times eager's time is needed, if the best call was not disturbed."""
        return self.best / self.eager_at_most if self.best < math.inf else 0.0

    @property
    def factor_at_most(self) -> float:
        known = self.eager < math.inf
        return self.own_at_most / self.eager if known else math.inf


class SpeedMeasurements:
    """Collects times of compiled code and eager, and decides which is faster.

    Args:
        first_s: Seconds that its compilation took.
        eager_s: Most seconds that eager may take, as far as known.
    """

    def __init__(self, first_s: float = 0.0, eager_s: float = math.inf):
        self._allowance = FIRST_SHARE * first_s
        self._eager_s = eager_s
        self._in_calls = 0.0
        self.spent = 0.0
        self._timed = 0
        self._sizes: LRU[Any, _Sizes] = LRU(_MOST_SIZES)

    @property
    def budget(self) -> float:
        """The seconds that extra timing runs may take in total."""
        return self._allowance + SHARE * self._in_calls

    @property
    def is_hopeless(self) -> bool:
        """Whether further timed calls cannot lead to a verdict."""
        return self._timed >= _MOST_TIMED

    def note_call(self, sizes: Any, seconds: float, counts: bool, calls: int = 1) -> None:
        """Records the time of a call of compiled code.

        Args:
            sizes: Of its inputs.
            seconds: That compiled code took.
            counts: Whether nobody disturbed it.
            calls: How many it stands for.
        """
        self._in_calls += seconds * calls
        self._timed += 1
        self.note_repeat(sizes, seconds, counts)
        self._of(sizes).timed += 1.0 if counts else _DISTURBED

    def _of(self, sizes: Any) -> _Sizes:
        found = self._sizes.get(sizes)
        if found is None:
            found = _Sizes()
            self._sizes.put(sizes, found)
        return found

    def eager_runs_due(self, sizes: Any) -> int:
        """Returns how many eager runs to time with the next call; 0 for none."""
        found = self._of(sizes)
        if found.timed < _BETWEEN[0] + _BETWEEN[1] * len(found.pairs):
            return 0
        eager = found.eager_at_most if found.pairs else min(self._eager_s, _GUESS * found.best)
        runs = 1 if eager >= _LONG_S else _RUNS
        cost = runs * eager + (found.best if self.should_repeat_compiled(sizes) else 0.0)
        return runs if self.spent + cost <= self.budget else 0

    def should_repeat_compiled(self, sizes: Any) -> bool:
        """Returns whether to run compiled code twice, to warm the caches as eager's."""
        found = self._of(sizes)
        return bool(found.pairs) and _FAST[-1][1] < found.factor < _COLD and found.best < _LONG_S

    def note_repeat(self, sizes: Any, seconds: float, counts: bool) -> None:
        """Records the time of an extra run of compiled code.

        Args:
            sizes: Of its inputs.
            seconds: That it took.
            counts: Whether nobody disturbed it.
        """
        found = self._of(sizes)
        found.own_at_most = min(found.own_at_most, seconds)
        found.recent_at_most = min(found.recent_at_most, seconds)
        if counts:
            found.own, found.recent = min(found.own, seconds), min(found.recent, seconds)

    def note_eager(self, sizes: Any, seconds: float, counts: bool) -> None:
        """Records the time of eager runs; call it after `note_call`.

        Args:
            sizes: Of the inputs.
            seconds: That the last run of eager took.
            counts: Whether nobody disturbed it.
        """
        found = self._of(sizes)
        own = found.recent_at_most if found.is_disturbed else found.recent
        found.pairs.append((own, seconds))
        found.eager_at_most = min(found.eager_at_most, seconds)
        if counts:
            found.eager = min(found.eager, seconds)
        found.recent = found.recent_at_most = math.inf
        found.timed = 0.0

    def verdict(self, is_busy: Callable[[], bool]) -> SpeedVerdict | None:
        """Returns the verdict; None if more must be measured.

        Args:
            is_busy: Whether others take processors.
        """
        for found in self._sizes.values():
            if found.pairs and (verdict := _judged(found, is_busy)) is not None:
                return verdict
        if not self.is_hopeless:
            return None
        reason = (
            "no input sizes were repeated often enough, or other processes disturbed every "
            "measurement"
        )
        return SpeedVerdict("not measured", reason=reason)


def _judged(found: _Sizes, is_busy: Callable[[], bool]) -> SpeedVerdict | None:
    bursts, factor = len(found.pairs), found.factor
    if any(bursts >= least and found.factor_at_most <= most for least, most in _FAST):
        busy = is_busy()
        if not busy or bursts >= MOST_BURSTS:
            return SpeedVerdict("fast enough", found.own_at_most, found.eager, busy * OTHERS)
    needed = min((least for count, least in SLOWER if bursts >= count), default=math.inf)
    if factor >= needed and _agree(found, needed):
        busy = found.is_disturbed or is_busy()
        if not busy or (bursts >= _BUSY[0] and factor >= _BUSY[1]):
            return SpeedVerdict("slower", found.best, found.eager_at_most, busy * OTHERS)
    if bursts < MOST_BURSTS:
        return None
    reason = f"the difference is too small, or the {bursts} measurements disagree"
    return SpeedVerdict("not sure", found.best, found.eager_at_most, reason)


def _agree(found: _Sizes, needed: float) -> bool:
    """Returns whether the bursts, each for itself, say the same."""
    needed = max(1.0, _AGREES * needed)
    others = sum(own < needed * eager for own, eager in found.pairs)
    return others <= len(found.pairs) // 6


@dataclass(frozen=True)
class TimedRuns:
    """The functions that are timed: compiled code, eager, and a repetition.

    Attributes:
        own: Runs compiled code, and does what else it takes to answer the call.
        eager: Runs the eager original, which changes nothing.
        again: Runs compiled code once more, beside a call, which changes nothing, either; None: it
            must not run.
        sized: Picks the values whose sizes may differ from call to call.
    """

    own: Callable[[Sequence[Any]], Sequence[Any]]
    eager: Callable[[Sequence[Any]], object]
    again: Callable[[Sequence[Any]], object] | None = None
    sized: Callable[[Sequence[Any]], Sequence[Any]] = tuple


class TimedCalls:
    """Runs compiled code and times it against eager until there is a verdict.

    Args:
        runs: The code.
        settled: Is told what was found; nothing is measured afterwards.
        first_s: See `SpeedMeasurements`; asked at the first call.
        system: Where numbers come from.

    Attributes:
        eager_s: See `SpeedMeasurements`.
        is_over: Nothing is measured any more.
    """

    def __init__(
        self,
        runs: TimedRuns,
        settled: Callable[[SpeedVerdict], None],
        first_s: Callable[[], float],
        system: System | None = None,
    ):
        self._own = runs.own
        self._eager = runs.eager
        self._again = runs.again
        self._sized = runs.sized
        self._settled = settled
        self._first_s = first_s
        self._system = System() if system is None else system
        self._lock = fork_safe_lock()
        self._pace: SpeedMeasurements | None = None
        self._watch = Watch(self._system)
        self._stride = 1
        self._calls = 0
        self.eager_s = math.inf
        self.is_over = False

    def __call__(self, values: Sequence[Any]) -> Sequence[Any]:
        """Answers a call."""
        self._calls += 1  # threads may lose a call: no harm
        if self._calls % self._stride or self.is_over or is_profiled() or compiles_nothing():
            return self._own(values)
        if not self._lock.acquire(blocking=False):  # another thread, which this one disturbs
            return self._own(values)
        try:
            return self._measured(values)
        finally:
            self._lock.release()

    def _measured(self, values: Sequence[Any]) -> Sequence[Any]:
        if self._pace is None:
            self._pace = SpeedMeasurements(self._first_s(), self.eager_s)
        pace = self._pace
        sizes = tuple(x.shape for x in self._sized(values) if isinstance(x, Tensor))
        eager = 0.0, False
        runs = pace.eager_runs_due(sizes)
        if runs:
            start = self._system.wall_s()
            try:
                with disable_current_modes(), torch.no_grad():
                    for _ in range(runs):
                        eager = self._timed(lambda: self._eager(values))[1:]
                if pace.should_repeat_compiled(sizes) and self._again is not None:
                    again = self._again
                    pace.note_repeat(sizes, *self._timed(lambda: again(values))[1:])
            except Exception as error:
                self._settle(
                    SpeedVerdict("not measured", reason=f"a run failed ({brief_error(error)})")
                )
                return self._own(values)
            pace.spent += self._system.wall_s() - start
        results, seconds, counts = self._timed(lambda: self._own(values))
        if self.is_over:  # it failed
            return results
        pace.note_call(sizes, seconds, counts, self._stride)
        if runs:
            pace.note_eager(sizes, *eager)
        verdict = pace.verdict(self._is_busy) if runs or pace.is_hopeless else None
        if verdict is not None:
            self._settle(verdict)
        timing = _TIMING_S[0] + _TIMING_S[1] * len(sizes)
        self._stride = max(1, math.ceil(timing / SHARE / max(seconds, 1e-9)))
        return results

    def _timed(self, run: Callable[[], T]) -> tuple[T, float, bool]:
        """Returns what code returns, its seconds, and whether nobody disturbed it."""
        system, calls = self._system, self._calls
        preempted, start = system.preemptions(), system.wall_s()
        results = run()
        seconds = system.wall_s() - start
        preempted = system.preemptions() - preempted
        return results, seconds, self._calls == calls and is_undisturbed(preempted, seconds)

    def _is_busy(self) -> bool:
        return self._watch.of_others() > free_processors() + _OF_OTHERS

    def _settle(self, verdict: SpeedVerdict) -> None:
        self.is_over = True
        self._settled(verdict)

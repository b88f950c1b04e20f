"""Decides which of several programs is faster, and how likely the difference is noise.

Candidates are interleaved: each round times every one of them once, in a random order, so that a
machine that slows down for a while slows them all. Before each there is a pause, in which the
threads of the one before stop spinning: torch's OpenMP threads do for about 8 ms.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from dynamo_backends.bench.packages import import_stats
from dynamo_backends.workers.statistics import Timing, speedup

PAUSE_S = 0.03
LEAST_ROUNDS = 5


def time_candidates(
    callables: dict[str, Callable[[], Any]],
    rounds: int,
    pause_s: float = PAUSE_S,
    warmup: int = 2,
    *,
    repeat: int = 1,
    lead_in: int = 1,
    budget_s: float = math.inf,
    least_rounds: int = LEAST_ROUNDS,
    baseline: str | None = None,
    synchronize: Callable[[], None] | None = None,
    on_round: Callable[[], None] | None = None,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Times callables alternately, in rounds.

    Args:
        callables: What to time, by name.
        rounds: Samples of each; see `budget_s`.
        pause_s: Sleep before each sample, in seconds.
        warmup: Untimed calls of each before the first round.
        repeat: Calls per sample; a sample is their mean. For calls of some microseconds.
        lead_in: Untimed calls after each pause, which wake the threads that slept.
        budget_s: No round begins later than this many seconds after the first.
        least_rounds: Least number of rounds all the same.
        baseline: What the speedups refer to; the first candidate unless given.
        synchronize: Called before and after each sample, for asynchronous devices.
        on_round: Called after each round, to show progress.
        seed: Seed of the order within the rounds, and of the confidence intervals.
        clock: Seconds. `time.thread_time` counts the calling thread's own work, which other
            processes disturb less.

    Raises:
        ValueError: There is nothing to time, or the baseline is not among the candidates.
    """
    if not callables or rounds < 1 or repeat < 1:
        raise ValueError("compare() needs at least one candidate, one round and one repetition")
    baseline = next(iter(callables)) if baseline is None else baseline
    if baseline not in callables:
        raise ValueError(f"baseline {baseline!r} is not one of: {', '.join(callables)}")
    for function in callables.values():
        for _ in range(warmup):
            function()
    samples: dict[str, list[float]] = {name: [] for name in callables}
    order = list(callables)
    shuffler = random.Random(seed)
    start = time.perf_counter()
    for i in range(rounds):
        if i >= least_rounds and time.perf_counter() - start > budget_s:
            break
        shuffler.shuffle(order)
        for name in order:
            time.sleep(pause_s)
            samples[name].append(_sample(callables[name], repeat, lead_in, synchronize, clock))
        if on_round is not None:
            on_round()
    return {
        name: Timing(name, tuple(times), speedup(samples[baseline], times, seed=seed))
        for name, times in samples.items()
    }


def _sample(
    function: Callable[[], Any],
    repeat: int,
    lead_in: int,
    synchronize: Callable[[], None] | None,
    clock: Callable[[], float],
) -> float:
    for _ in range(lead_in):
        function()
    if synchronize is not None:
        synchronize()
    start = clock()
    for _ in range(repeat):
        function()
    if synchronize is not None:
        synchronize()
    return (clock() - start) / repeat


def geometric_mean(values: Iterable[float]) -> float:
    """Returns the geometric mean of positive numbers; NaN of none.

    Raises:
        ValueError: A value is not positive.
    """
    logarithms = []
    for value in values:
        if not value > 0:
            raise ValueError(f"a geometric mean needs positive numbers, got {value}")
        logarithms.append(math.log(value))
    return math.exp(statistics.fmean(logarithms)) if logarithms else math.nan


def p_of_pairs(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns p of Wilcoxon's signed-rank test on the logarithms of times of the same rounds.

    Args:
        first: Times of one, by round.
        second: Times of the other, by round.

    Returns:
        The two-sided p-value; 1 if no round differs.
    """
    differences = np.log(np.asarray(first)) - np.log(np.asarray(second))
    if not differences.any():
        return 1.0
    return float(import_stats().wilcoxon(differences).pvalue)


def p_of_groups(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns the p-value of the two-sided Mann-Whitney test of two samples."""
    return float(import_stats().mannwhitneyu(first, second).pvalue)


def adjusted(ps: Sequence[float]) -> list[float]:
    """Adjusts p-values for multiple testing (Benjamini and Hochberg, 1995)."""
    return [float(p) for p in import_stats().false_discovery_control(list(ps))] if len(ps) else []

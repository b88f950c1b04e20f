"""Medians of measured times, and the uncertainty of their ratio."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Ratio:
    """A speedup with its 95% confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Timing:
    """Times of one candidate.

    Attributes:
        name: The candidate's.
        samples: Seconds per call, one of each round.
        speedup: Median time of the baseline over this one's; 1 for the baseline itself.
    """

    name: str
    samples: tuple[float, ...]
    speedup: Ratio

    @property
    def median(self) -> float:
        """Median seconds per call."""
        return statistics.median(self.samples)


def relative_spread(times: Sequence[float]) -> float:
    """Returns interquartile range over median of times; 0 for fewer than four."""
    if len(times) < 4:
        return 0.0
    low, middle, high = np.percentile(np.asarray(times, float), [25, 50, 75])
    return float((high - low) / middle) if middle > 0 else 0.0


def separate_speedup(
    baseline: Sequence[float], times: Sequence[float], resamples: int = 2000, seed: int = 0
) -> Ratio:
    """`speedup` of times that were not taken in the same rounds; there may be fewer of one."""
    first, second = np.asarray(baseline, float), np.asarray(times, float)
    generator = np.random.default_rng(seed)
    medians = [
        np.median(x[generator.integers(len(x), size=(resamples, len(x)))], axis=1)
        for x in (first, second)
    ]
    return _ratio(first, second, medians[0] / medians[1])


def speedup(
    baseline: Sequence[float], times: Sequence[float], resamples: int = 2000, seed: int = 0
) -> Ratio:
    """Ratio of two medians with a 95% bootstrap interval.

    Rounds are drawn as a whole, so that what disturbed both candidates in a round cancels.

    Args:
        baseline: Times of the baseline, by round.
        times: Times of the candidate, by round.
        resamples: Number of bootstrap samples.
        seed: Seed of the resampling.

    Raises:
        ValueError: The two have different numbers of rounds.
    """
    if len(baseline) != len(times) or not times:
        raise ValueError(f"{len(baseline)} rounds of the baseline but {len(times)} of the other")
    first, second = np.asarray(baseline, float), np.asarray(times, float)
    drawn = np.random.default_rng(seed).integers(len(first), size=(resamples, len(first)))
    return _ratio(first, second, np.median(first[drawn], axis=1) / np.median(second[drawn], axis=1))


def _ratio(first: np.ndarray, second: np.ndarray, ratios: np.ndarray) -> Ratio:
    low, high = np.percentile(ratios, [2.5, 97.5])
    value = float(np.median(first) / np.median(second))
    return Ratio(value, min(float(low), value), max(float(high), value))

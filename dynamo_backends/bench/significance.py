"""How probable it is that measured differences are noise."""

from collections.abc import Sequence

import numpy as np

from dynamo_backends.bench.packages import import_stats


def p_of_pairs(first: Sequence[float], second: Sequence[float]) -> float:
    """Whether times of the same rounds differ: Wilcoxon's signed-rank test on their logarithms.

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
    """Returns whether two samples come from one distribution: the two-sided Mann-Whitney test."""
    return float(import_stats().mannwhitneyu(first, second).pvalue)


def adjusted(ps: Sequence[float]) -> list[float]:
    """P-values that allow for how many there are (Benjamini and Hochberg, 1995)."""
    return [float(p) for p in import_stats().false_discovery_control(list(ps))] if len(ps) else []

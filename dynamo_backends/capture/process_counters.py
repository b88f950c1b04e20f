"""Counters for whoever watches a service."""

from dynamo_backends.interface.counters import count_live_executables, total
from dynamo_backends.workers.progress import COUNTS


def counters() -> dict[str, float]:
    """Returns what this process has compiled and run since it began. Takes a few microseconds.

    Returns:
        The counts of `interface.counters.Counters`, which only grow; "autotune_..." are those of
        `tuning.counts.Counts`; "executables_kept" is how many are in memory now.

    Examples:
        >>> dynamo_backends.counters()["failed"]
        0
    """
    return {
        **total.as_dict(),
        **COUNTS.as_dict("autotune_"),
        "executables_kept": count_live_executables(),
    }

"""Which share of the tests a run without `--full` has; it moves on with every commit.

The rotation is a number: the count of commits of this checkout, or what `--rotation N` says. A test
that takes long, with all of its parameters, runs with as many of them as take `SECONDS`; of those
marked `long` each run has one in `COMMITS`. After so many commits all of them have run, and runs of
one commit have the same. `make test ARGS=--record-seconds` measures what tests take. pytest's
header shows the number; `make test ARGS="--rotation N"` repeats a run. Tests that draw random
programs take their seeds from it, too. PyTorch's operator database has longer turns of its own
(tests/conformance).
"""

import functools
import json
import os
import subprocess
import time
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

COMMITS = 20
"""Commits after which each test, parameter, and what is marked `long` has run."""

SECONDS = 1.5
"""Seconds that each run gives to one test with all of its parameters, where that is enough to run
each within `COMMITS`."""

RECORD = Path(__file__).with_name("seconds.json")
"""File to test to the mean seconds of one of its parameters; see `record`."""

LEAST = 0.05
"""Tests that take fewer seconds are not recorded."""

VARIABLE = "DYNAMO_BACKENDS_TEST_ROTATION"


@functools.cache
def rotation() -> int:
    """The rotation of this run, here and in the processes that share its work."""
    if (given := os.environ.get(VARIABLE)) is not None:
        return int(given)
    command = ["git", "rev-list", "--count", "HEAD"]
    try:
        count = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
        return int(count.stdout)
    except (OSError, subprocess.CalledProcessError):
        return int(time.time() // 86400)  # not a checkout: moves on with every day


def is_in(name: str, share: int) -> bool:
    """Whether this rotation has what is called `name`, of which each has one in `share`."""
    return (zlib.crc32(name.encode()) + rotation()) % share == 0


def seeds(count: int) -> range:
    """Seeds of random programs, others at each rotation."""
    return range(rotation() * count, (rotation() + 1) * count)


def part(count: int, share: int) -> range:
    """One in `share` of the numbers below `count`, others at each rotation."""
    return range(rotation() % share, count, share)


def long_if(long: bool, *values: Any, **settings: Any) -> Any:
    """A parameter that one run in `COMMITS` has if it takes long; see `pytest.param`."""
    return pytest.param(*values, marks=pytest.mark.long if long else (), **settings)


def left_out(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Tests that another rotation runs."""
    left_out = set()
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("long"):
            if not is_in(item.nodeid, COMMITS):
                left_out.add(item)
        else:
            groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    seconds = recorded_seconds()
    for name, group in groups.items():
        share = share_of(seconds.get(name, 0) * len(group))
        turn = zlib.crc32(name.encode()) + rotation()
        left_out |= {item for i, item in enumerate(group) if (i + turn) % share}
    return left_out


def share_of(seconds: float) -> int:
    """Of the parameters of a test that takes so long with all of them, one in so many runs."""
    return min(COMMITS, max(1, round(seconds / SECONDS)))


def recorded_seconds() -> dict[str, float]:
    """Mean seconds of one parameter by test; tests that are not named take little."""
    record = json.loads(RECORD.read_text())
    return {f"{file}::{test}": s for file, tests in record.items() for test, s in tests.items()}


def record(durations: Mapping[str, float]) -> None:
    """Writes what tests took into `RECORD`; of tests that did not run the old seconds stay.

    Args:
        durations: Seconds by the name of a test with its parameter, as in pytest's reports.
    """
    taken: dict[str, list[float]] = {}
    for name, seconds in durations.items():
        taken.setdefault(name.partition("[")[0], []).append(seconds)
    root = Path(__file__).parents[1]
    found = {n: s for n, s in recorded_seconds().items() if (root / n.partition("::")[0]).exists()}
    found |= {name: round(mean(seconds), 2) for name, seconds in taken.items()}
    files: dict[str, dict[str, float]] = {}
    for name in sorted(found):
        if found[name] >= LEAST:
            file, _, test = name.partition("::")
            files.setdefault(file, {})[test] = found[name]
    RECORD.write_text(json.dumps(files, indent=1) + "\n")

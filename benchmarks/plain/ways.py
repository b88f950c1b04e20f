"""Ways to run a network, timed against each other, and the table of them."""

import argparse
import platform
import random
import shlex
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from plain.networks import Network, networks

CALLS = 10
"""Of those whose time is amortised."""

PAUSE_S = 0.03
"""Before each sample: the threads of the way before stop spinning."""

RUNS = 2
"""Of each way before the first sample."""


class Calls(Protocol):
    """Makes one call or several, and returns the result of each when all are done."""

    def __call__(self) -> Sequence[Tensor]:
        """Results on any device, those of the first inputs."""


@dataclass(frozen=True)
class Way:
    """A way to run a network.

    Attributes:
        run: Makes `calls` calls.
        calls: How many.
    """

    run: Calls
    calls: int = 1


class NoSuchNetworkError(Exception):
    """A network was named that does not exist."""


def parser(summary: str) -> argparse.ArgumentParser:
    """A parser of the options that all programs of ways have.

    Args:
        summary: A program's docstring, of which the first line is shown.
    """
    made = argparse.ArgumentParser(description=summary.splitlines()[0])
    made.add_argument("--models", nargs="+", metavar="NAME", help="only these")
    made.add_argument("--scale", default="bench", choices=["bench", "test"], help="model sizes")
    made.add_argument("--rounds", type=int, default=20, help="samples of each")
    made.add_argument("--json", metavar="FILE", help="save the results")
    return made


def chosen(settings: Any) -> dict[str, Network]:
    """The networks that a command line names; by default all.

    Raises:
        NoSuchNetworkError: One does not exist; the text says which there are.
    """
    every = networks(settings.scale)
    for name in settings.models or ():
        if name not in every:
            raise NoSuchNetworkError(f"unknown model {name!r}; there are: {', '.join(every)}")
    return {name: every[name] for name in settings.models or every}


def wrong_ways(ways: Mapping[str, Way], expected: Sequence[Tensor]) -> list[str]:
    """Names of the ways whose results are not those that are expected.

    Args:
        ways: By name.
        expected: Of each input, in the order of the calls.
    """
    return [name for name, way in ways.items() if not _is_right(way, expected)]


def _is_right(way: Way, expected: Sequence[Tensor]) -> bool:
    results = [result.detach().to("cpu") for result in way.run()]
    pairs = zip(results, expected, strict=False)
    return len(results) == way.calls and all(
        found.shape == right.shape and torch.allclose(found, right, rtol=1e-3, atol=1e-3)
        for found, right in pairs
    )


def measure(ways: Mapping[str, Way], rounds: int, seed: int = 0) -> dict[str, float]:
    """Medians in milliseconds of one call, by name.

    Each round takes a sample of every way, in random order, so that a machine that slows down for a
    while slows all of them.

    Args:
        ways: By name.
        rounds: Samples of each.
        seed: Of the order.
    """
    for way in ways.values():
        for _ in range(RUNS):
            way.run()
    samples: dict[str, list[float]] = {name: [] for name in ways}
    order, shuffler = list(ways), random.Random(seed)
    for _ in range(rounds):
        shuffler.shuffle(order)
        for name in order:
            time.sleep(PAUSE_S)
            start = time.perf_counter()
            ways[name].run()
            samples[name].append((time.perf_counter() - start) / ways[name].calls)
    return {name: statistics.median(times) * 1e3 for name, times in samples.items()}


def markdown(rows: Mapping[str, Mapping[str, float]]) -> str:
    """A table: a line for each network, and in brackets how many times as fast as eager a way is.

    Args:
        rows: Milliseconds of each way by name, for each network; "eager" is among them.
    """
    names = list(next(iter(rows.values())))
    lines = [["model", *(f"{name}, ms" for name in names)], ["---"] * (len(names) + 1)]
    for network, times in rows.items():
        cells = [f"{ms:.2f}" + _gain(name, times) for name, ms in times.items()]
        lines.append([network, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _gain(name: str, times: Mapping[str, float]) -> str:
    return "" if name == "eager" else f" ({times['eager'] / times[name]:.2f})"


def typed(command: str, arguments: Sequence[str] | None) -> str:
    """A command line as it is published, without the place where its results are kept.

    Args:
        command: Without arguments.
        arguments: None: the process's own.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--json" in given:
        place = given.index("--json")
        del given[place : place + 2]
    return f"{command} {shlex.join(given)}".strip()


def facts(**versions: str) -> dict[str, Any]:
    """What results depend on: the date, the processor, threads, and versions.

    Args:
        **versions: Of packages beside Python and torch.
    """
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": _processor(),
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {"torch": torch.__version__, **versions},
    }


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.processor()

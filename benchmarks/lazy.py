"""Lazy tensors, recorded at every call, against eager and against graphs that are compiled once.

    python benchmarks/lazy.py
    python benchmarks/lazy.py --models mlp bert --json lazy.json
    make lazy-xla ARGS="--models mlp bert"     # the same of torch_xla itself

"lazy" is the model on torch's device "lazy": each call copies its input there, records the model,
looks the graph up, runs it and brings the result back; "lazy, 10 calls" waits once for ten calls
with different inputs, so that the recording of one may overlap the execution of the one before.
`ltc_trace` does at every call what "lazy" does, for the graph that Dynamo captured; `ltc` and
`openxla` compile that once.

With --torch-xla lazy tensors are torch_xla's on the CPU: inputs are on its device beforehand, and
results stay there; "torch_xla openxla" is its `torch.compile(backend="openxla")`. It needs an older
torch than this package, so `make lazy-xla` makes an environment that has it and nothing of this
package: without the option, too, only torch is imported before the command line is read.
"""

import argparse
import copy
import gc
import json
import os
import platform
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from networks import Network, networks

COMPILED = ("ltc_trace", "ltc", "openxla")
CALLS = 10
"""Of those whose time is amortised."""

PAUSE_S = 0.03
"""Before each sample: the threads of the way before stop spinning."""

RUNS = 2
"""Of each way before the first sample."""


@dataclass(frozen=True)
class Way:
    """A way to run a network: makes `calls` calls, and returns their results when all are done."""

    run: Callable[[], Sequence[Tensor]]
    calls: int = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if a result is wrong, 2 if it cannot run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--scale", default="bench", choices=["bench", "test"], help="model sizes")
    parser.add_argument("--rounds", type=int, default=20, help="samples of each")
    parser.add_argument("--torch-xla", action="store_true", help="torch_xla's lazy tensors")
    parser.add_argument("--json", metavar="FILE", help="save the results")
    settings = parser.parse_args(arguments)
    every = networks(settings.scale)
    if unknown := [name for name in settings.models or () if name not in every]:
        print(f"unknown model {unknown[0]!r}; there are: {', '.join(every)}", file=sys.stderr)
        return 2
    torch_xla = None
    if settings.torch_xla:
        try:
            torch_xla = started()
        except ImportError as error:
            print(error, file=sys.stderr)
            return 2
    known = facts(torch_xla)
    print(known)
    rows: dict[str, dict[str, float]] = {}
    wrong = []
    for name in settings.models or every:
        with torch.no_grad():
            network = every[name]
            ways = ways_of(network) if torch_xla is None else ways_of_torch_xla(network, torch_xla)
            expected = [network.make()(x) for x in network.inputs(CALLS)]
            wrong += [f"{name}, {way}" for way in wrong_ways(ways, expected)]
            rows[name] = measure(ways, settings.rounds)
        torch.compiler.reset()
        gc.collect()
    print(markdown(rows))
    for each in wrong:
        print(f"{each}: the result is wrong", file=sys.stderr)
    if settings.json:
        content = {
            "kind": "lazy", "command": typed(arguments), "environment": known, "results": rows,
            "wrong": wrong,
        }  # fmt: skip
        Path(settings.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return int(bool(wrong))


def ways_of(network: Network) -> dict[str, Way]:
    """Eager, lazy tensors with one wait for one call and for ten, and what is compiled."""
    from dynamo_backends.lazy import lowering

    lowering.start()
    model, inputs = network.make(), network.inputs(CALLS)
    moved = copy.deepcopy(model).to("lazy")

    def lazy(calls: int) -> list[Tensor]:
        results = []
        for x in inputs[:calls]:
            results.append(moved(x.to("lazy")))
            torch._lazy.mark_step()
        return [result.to("cpu") for result in results]

    ways = {
        "eager": Way(lambda: [model(inputs[0])]),
        "lazy": Way(lambda: lazy(1)),
        f"lazy, {CALLS} calls": Way(lambda: lazy(CALLS), CALLS),
    }
    for name in COMPILED:
        compiled = torch.compile(model, backend=name, fullgraph=True)
        ways[name] = Way(lambda run=compiled: [run(inputs[0])])  # type: ignore[misc]
    return ways


def started() -> Any:
    """The package torch_xla, on the CPU.

    Raises:
        ImportError: It is not in this environment.
    """
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    os.environ.setdefault("PJRT_NPROC", str(torch.get_num_threads()))
    try:
        import torch_xla
    except ImportError as error:
        raise ImportError(
            f"torch_xla cannot be imported ({error}). `make lazy-xla` makes an environment that "
            "has it and runs this program there."
        ) from error
    return torch_xla


def ways_of_torch_xla(network: Network, torch_xla: Any) -> dict[str, Way]:
    """Eager, lazy tensors with one wait for one call and for ten, and what Dynamo captures."""
    device, wait = torch_xla.device(), torch_xla.core.xla_model.wait_device_ops
    model, inputs = network.make(), network.inputs(CALLS)
    moved = copy.deepcopy(model).to(device)
    given = [x.to(device) for x in inputs]
    compiled = torch.compile(moved, backend="openxla")

    def lazy(calls: int) -> list[Tensor]:
        results = []
        for x in given[:calls]:
            results.append(moved(x))
            torch_xla.sync()
        wait()
        return results

    def captured() -> list[Tensor]:
        result = compiled(given[0])
        wait()
        return [result]

    return {
        "eager": Way(lambda: [model(inputs[0])]),
        "lazy": Way(lambda: lazy(1)),
        f"lazy, {CALLS} calls": Way(lambda: lazy(CALLS), CALLS),
        "torch_xla openxla": Way(captured),
    }


def wrong_ways(ways: Mapping[str, Way], expected: Sequence[Tensor]) -> list[str]:
    """Names of the ways whose results are not those expected of each input, in their order."""
    return [name for name, way in ways.items() if not _is_right(way, expected)]


def _is_right(way: Way, expected: Sequence[Tensor]) -> bool:
    results = [result.detach().to("cpu") for result in way.run()]
    return len(results) == way.calls and all(
        found.shape == right.shape and torch.allclose(found, right, rtol=1e-3, atol=1e-3)
        for found, right in zip(results, expected, strict=False)
    )


def measure(ways: Mapping[str, Way], rounds: int, seed: int = 0) -> dict[str, float]:
    """Medians in milliseconds of one call, by name.

    Each round takes a sample of every way, in random order, so that a machine that slows down for a
    while slows all of them.
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
        gains = {
            n: "" if n == "eager" else f" ({times['eager'] / ms:.2f})" for n, ms in times.items()
        }
        lines.append([network, *(f"{ms:.2f}{gains[n]}" for n, ms in times.items())])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def published(content: Mapping[str, Any]) -> list[str]:
    """The table of results as `main` saves them, in Markdown."""
    return [markdown(content["results"])]


def typed(arguments: Sequence[str] | None) -> str:
    """The command line as it is published, without the place where its results are kept."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--json" in given:
        place = given.index("--json")
        del given[place : place + 2]
    return f"python benchmarks/lazy.py {shlex.join(given)}".strip()


def facts(torch_xla: Any) -> dict[str, Any]:
    """What results depend on; all that this package's benchmarks say, if it is used."""
    date = time.strftime("%Y-%m-%d")
    if torch_xla is None:
        from dynamo_backends.bench.environment import environment

        return {"date": date, **environment()}
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return {
        "date": date,
        "processor": names[0] if names else platform.processor(),
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {"torch": torch.__version__, "torch_xla": torch_xla.__version__},
    }


if __name__ == "__main__":
    raise SystemExit(main())

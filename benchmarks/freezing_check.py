"""What it costs at every call to know that frozen weights have not changed.

    python benchmarks/freezing_check.py --parameters 60

All parameters count as copied by the backend, which is the dearest case: of weights that a backend
reads in torch's memory, only the address is looked at. "time" is the median of interleaved rounds;
"CPU" the same of the thread's own CPU time, which other processes disturb less.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

import harness
from dynamo_backends.runtime.weight_binding import Policy, WeightSnapshot, weight_addresses

POLICIES: tuple[Policy, ...] = ("probe", "strict")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.arguments(__doc__, rounds=30)
    parser.add_argument("--parameters", type=int, default=200)
    parser.add_argument("--width", type=int, default=64, help="channels of the convolutions")
    parser.add_argument("--repeat", type=int, default=200, help="calls per round")
    settings = parser.parse_args(arguments)
    console = harness.announce()
    weights = parameters(settings.parameters, settings.width)
    with console.status("measuring"), torch.no_grad():
        records = measure(checks(weights), settings.rounds, settings.repeat)
    harness.report(published, settings, "freezing check", records, console)
    return 0


def parameters(count: int, width: int) -> list[Tensor]:
    """Weights of convolutions and biases, in turn."""
    torch.manual_seed(0)
    shapes = ((width, width, 3, 3), (width,))
    return [nn.Parameter(torch.randn(shapes[i % 2])) for i in range(count)]


def checks(weights: list[Tensor]) -> dict[str, Callable[[], Any]]:
    """What is done at every call, by policy. "address" is the part that no policy leaves out."""
    snapshots = {
        policy: WeightSnapshot(weights, range(len(weights)), policy) for policy in POLICIES
    }
    shared = WeightSnapshot(weights, (), "probe")
    addresses = weight_addresses(weights)

    def check(snapshot: WeightSnapshot) -> Callable[[], bool]:
        def run() -> bool:
            return addresses == weight_addresses(weights) and snapshot.is_current(weights)

        assert run()
        return run

    return {
        "address (weights that are not copied)": check(shared),
        **{policy: check(snapshot) for policy, snapshot in snapshots.items()},
    }


def measure(runs: dict[str, Callable[[], Any]], rounds: int, repeat: int) -> list[dict[str, Any]]:
    """Medians over interleaved rounds of `repeat` calls, in microseconds."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for round_number in range(rounds + 1):
        for name, run in runs.items():
            calls = repeat if name != "strict" else max(1, repeat // 100)
            wall, cpu = time.perf_counter(), time.thread_time()
            for _ in range(calls):
                run()
            cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
            if round_number:  # the first warms up
                samples[name].append((wall / calls * 1e6, cpu / calls * 1e6))
    return [
        {
            "check": name,
            "time_us": statistics.median(wall for wall, _ in pairs),
            "cpu_us": statistics.median(cpu for _, cpu in pairs),
        }
        for name, pairs in samples.items()
    ]


def published(content: Mapping[str, Any]) -> list[Table]:
    """Microseconds of each check."""
    rows = [[r["check"], f"{r['time_us']:.1f}", f"{r['cpu_us']:.1f}"] for r in content["results"]]
    return [harness.table(("check", "time", "CPU"), rows, "µs per call")]


if __name__ == "__main__":
    raise SystemExit(main())

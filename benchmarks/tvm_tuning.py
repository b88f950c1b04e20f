"""Single calls compiled by TVM against eager: with default schedules, and with tuned ones.

    python benchmarks/tvm_tuning.py
    python benchmarks/tvm_tuning.py --calls "softmax 1536 x 197" --tune-trials 64 --tune-budget 300

Each call is a graph of its own in a process of its own, with empty caches: it is compiled without
tuning and with it, and both are timed in turns with eager. Shown are speedups over eager, in how
many functions of the graph tuning found a faster schedule, and the seconds of the call that tuned.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import harness

BATCH = 4
WAYS = ("default", "tuned")

Call = tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]
"""Makes what is called; the shapes of its inputs."""


class Product(nn.Module):
    """Of two batches of matrices."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """``(batch, n, k)`` by ``(batch, k, m)``."""
        return x @ y


def _convolution(
    channels: tuple[int, int], size: int, window: int = 3, stride: int = 1, groups: int = 1
) -> Call:
    def make() -> nn.Module:
        return nn.Conv2d(*channels, window, stride, window // 2, groups=groups)

    return make, ((BATCH, channels[0], size, size),)


CALLS: dict[str, Call] = {
    "convolution 64 to 64, 3 x 3, 56 x 56": _convolution((64, 64), 56),
    "convolution 256 to 64, 1 x 1, 56 x 56": _convolution((256, 64), 56, window=1),
    "convolution 512 to 512, 3 x 3, 7 x 7": _convolution((512, 512), 7),
    "convolution 3 to 64, 7 x 7 / 2, 224 x 224": _convolution((3, 64), 224, window=7, stride=2),
    "depthwise convolution, 64 channels, 3 x 3, 56 x 56": _convolution((64, 64), 56, groups=64),
    "linear layer 512 x 768 x 3072, GELU": (
        lambda: nn.Sequential(nn.Linear(768, 3072), nn.GELU()),
        ((512, 768),),
    ),
    "products 12 x (197 x 64) x (64 x 197)": (Product, ((12, 197, 64), (12, 64, 197))),
    "layer normalization 788 x 768": (lambda: nn.LayerNorm(768), ((788, 768),)),
    "softmax 1536 x 197": (lambda: nn.Softmax(-1), ((1536, 197),)),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if a call could not be measured."""
    settings = parse(arguments)
    if settings.child:
        return child(settings)
    console = harness.announce()
    calls = track(settings.calls, "tuning", console=console, transient=True)
    records = [{"call": name, **in_a_process(name, settings)} for name in calls]
    for each in published({"results": records}):
        console.print(each)
    if settings.json:
        harness.save_json(settings.json, "tuned by TVM", records, settings=vars(settings))
    return int(any("error" in record for record in records))


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """The table of results as `main` saves them."""
    table = Table("call", "eager ms", *WAYS, "faster functions", "s")
    for record in content["results"]:
        if "error" in record:
            table.add_row(record["call"], record["error"])
            continue
        ratios = [harness.format_ratio(harness.Ratio(*record["speedups"][way])) for way in WAYS]
        count, seconds = str(record["functions"]), f"{record['first_call_s']:.0f}"
        table.add_row(record["call"], f"{record['eager_ms']:.2f}", *ratios, count, seconds)
    return [table]


def in_a_process(name: str, settings: argparse.Namespace) -> dict[str, Any]:
    """Tunes and times a call in a fresh process with an empty cache folder."""
    command = [__file__, "--child", name]
    for option in ("tune_trials", "tune_budget", "rounds"):
        command += [f"--{option.replace('_', '-')}", str(getattr(settings, option))]
    with tempfile.TemporaryDirectory() as folder:
        return harness.result_of_child(
            command, {"DYNAMO_BACKENDS_CACHE": folder}, 3 * settings.tune_budget + 300
        )


@torch.no_grad()
def child(settings: argparse.Namespace) -> int:
    """Measures one call and hands the figures back."""
    make, shapes = CALLS[settings.child]
    model, inputs = make().eval(), tuple(torch.randn(shape) for shape in shapes)
    tuned = {"tune_trials": settings.tune_trials, "tune_budget_s": settings.tune_budget}
    made = {
        way: harness.compile_model(model, inputs, "tvm", options=options)
        for way, options in zip(WAYS, ({}, tuned), strict=True)
    }
    ways = {way: partial(each.function, *inputs) for way, each in made.items()}
    timings = harness.compare({"eager": partial(model, *inputs), **ways}, settings.rounds)
    speedups = {way: timings[way].speedup for way in WAYS}
    harness.hand_back(
        eager_ms=timings["eager"].median * 1e3,
        speedups={way: [ratio.value, ratio.low, ratio.high] for way, ratio in speedups.items()},
        functions=sum(report.tuned for report in made["tuned"].reports),
        first_call_s=made["tuned"].first_call_s,
    )
    return 0


def parse(arguments: Sequence[str] | None) -> Any:
    """Parses the command line."""
    parser = harness.arguments(__doc__, rounds=30)
    parser.add_argument("--calls", nargs="+", default=list(CALLS), choices=CALLS, metavar="CALL")
    parser.add_argument("--tune-trials", type=int, default=32, help="of each graph")
    parser.add_argument("--tune-budget", type=float, default=90, help="seconds for each graph")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

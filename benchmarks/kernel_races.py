"""The ways to compute a layer that race in `inductor_freezing`, each timed against the others.

    python benchmarks/kernel_races.py
    python benchmarks/kernel_races.py --precision bf16
    python benchmarks/kernel_races.py --layers "conv 3x3, 64 to 64, 56x56" --rounds 50

Each layer is compiled at batch 4 with no choice on disk, so that its kernels race; what raced is
then timed again, interleaved, and longer. Bias and activation are not part of a race.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import harness
from dynamo_backends.kernels import native_code
from dynamo_backends.workers.choices import Choice, Choices
from dynamo_backends.workers.race import Measured, Run

BATCH = 4

Layer = tuple[Callable[[], nn.Module], tuple[int, ...]]
"""Makes a layer; the shape of its input."""


class Attention(nn.Module):
    """Of one input, which is query, key and value."""

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, heads, length, features of a head)``."""
        return F.scaled_dot_product_attention(x, x, x)


def _convolution(
    channels: tuple[int, int], size: int, window: int = 3, stride: int = 1, groups: int = 1
) -> Layer:
    padding = window // 2 if window < 11 else 2

    def make() -> nn.Module:
        return nn.Conv2d(*channels, window, stride, padding, groups=groups)

    return make, (BATCH, channels[0], size, size)


def _linear(features: tuple[int, int], rows: int = BATCH) -> Layer:
    return lambda: nn.Linear(*features), (rows, features[0])


LAYERS: dict[str, Layer] = {
    "conv 3x3, 64 to 64, 56x56": _convolution((64, 64), 56),
    "conv 3x3, 128 to 128, 28x28": _convolution((128, 128), 28),
    "conv 3x3, 256 to 256, 14x14": _convolution((256, 256), 14),
    "conv 3x3, 512 to 512, 7x7": _convolution((512, 512), 7),
    "conv 3x3, 512 to 512, 28x28": _convolution((512, 512), 28),
    "conv 3x3, 64 to 64, 224x224": _convolution((64, 64), 224),
    "conv 7x7/2, 3 to 64, 224x224": _convolution((3, 64), 224, 7, 2),
    "conv 11x11/4, 3 to 64, 224x224": _convolution((3, 64), 224, 11, 4),
    "conv 3x3, 32 groups of 4, 56x56": _convolution((128, 128), 56, groups=32),
    "conv 3x3, 32 groups of 8, 28x28": _convolution((256, 256), 28, groups=32),
    "conv 3x3/2, 32 groups of 8, 56x56": _convolution((256, 256), 56, stride=2, groups=32),
    "linear 4096 to 1000, 4 rows": _linear((4096, 1000)),
    "linear 9216 to 4096, 4 rows": _linear((9216, 4096)),
    "linear 768 to 3072, 512 rows": _linear((768, 3072), 512),
    "attention, 24 heads of 197 x 64": (Attention, (BATCH, 6, 197, 64)),
}
"""By name."""


@dataclass(frozen=True)
class Raced:
    """A race that took place.

    Attributes:
        runs: The ways, by name.
        layouts: Of their inputs.
        chosen: The way that won.
    """

    runs: Mapping[str, Run]
    layouts: Sequence[native_code.Layout]
    chosen: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    settings = parse(arguments)
    console = harness.announce()
    names = settings.layers or list(LAYERS)
    records = [
        record
        for name in track(names, "measuring", console=console, transient=True)
        for record in measure(name, settings.precision, settings.rounds)
    ]
    console.print(table(records))
    if settings.json:
        harness.save_json(settings.json, "kernel races", records, settings=vars(settings))
    return 0


@torch.no_grad()
def measure(name: str, precision: str, rounds: int) -> list[dict[str, Any]]:
    """A row for each race of a layer: milliseconds of each way."""
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    with races() as found:
        compiled = torch.compile(
            make().eval(), backend="inductor_freezing", options={"precision": precision}
        )
        compiled(torch.randn(shape))
    torch.compiler.reset()
    records = []
    for raced in found:
        inputs = [
            torch.empty_strided(size, strides, dtype=dtype).normal_()
            for size, strides, dtype in raced.layouts
        ]
        timings = harness.compare(
            {way: lambda run=run, x=inputs: run(x) for way, run in raced.runs.items()},  # type: ignore[misc]
            rounds,
            repeat=10,
            budget_s=20,
        )
        times = {way: timing.median * 1e3 for way, timing in timings.items()}
        records.append({"layer": name, "ms": times, "chosen": raced.chosen})
    return records


@contextmanager
def races() -> Iterator[list[Raced]]:
    """Collects the races within; none is decided by what is on disk."""
    found: list[Raced] = []
    race, under_way = native_code._race, list[tuple[Any, Any]]()
    kept = Choices(native_code._store, native_code._holds_for)

    def note(
        preferred: str, runs: Mapping[str, Run], layouts: Sequence[native_code.Layout]
    ) -> Measured:
        under_way.append((runs, layouts))
        return race(preferred, runs, layouts)

    def choose(kind: str, safe: str, preferred: str, race: Callable[[], Measured]) -> Choice:
        choice = kept(kind, safe, preferred, race)
        found.extend(Raced(*each, choice.way) for each in under_way)
        under_way.clear()
        return choice

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {"DYNAMO_BACKENDS_CACHE": folder}),
        mock.patch.object(native_code, "_race", note),
        mock.patch.object(native_code, "choices", choose),
    ):
        yield found


def table(records: Sequence[Mapping[str, Any]]) -> Table:
    """The results for people; the first way is the usual one."""
    found = Table("layer", "ms of each way", "chosen", "times as fast as the first")
    for r in records:
        usual = next(iter(r["ms"].values()))
        times = ", ".join(f"{way} {ms:.2f}" for way, ms in r["ms"].items())
        found.add_row(r["layer"], times, r["chosen"], f"{usual / r['ms'][r['chosen']]:.2f}")
    return found


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """What a file of results says, for a page."""
    return [table(content["results"])]


def parse(arguments: Sequence[str] | None) -> Any:
    """Parses the command line."""
    parser = harness.arguments(__doc__, rounds=30)
    parser.add_argument("--precision", default="float32", choices=["float32", "bf16"])
    parser.add_argument("--layers", nargs="+", choices=LAYERS, metavar="NAME", help="only these")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())

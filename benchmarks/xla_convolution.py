"""Does the rule table pick the fastest XLA program for each convolution?

    python benchmarks/xla_convolution.py
    python benchmarks/xla_convolution.py --only stem --json convolutions.json

Every program that is right for a shape is compiled with its weights prepared ahead, and all are
timed in the same rounds with torch's own convolution. A row passes unless the best program is more
than 1.15 times as fast as the chosen one, by the lower bound of the 95% interval. The exit status
is 1 if a row fails.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import track
from rich.table import Table

import harness
from dynamo_backends.xla.lowering.convolution_algorithms import IM2COL
from dynamo_backends.xla.lowering.convolution_nhwc import (
    PROGRAMS,
    ConvolutionAlgorithm,
    ConvShape,
    choose_rule,
)
from dynamo_backends.xla.lowering.convolution_rules import blocks_program

# name: in channels, size, out channels, kernel, stride, padding, groups
ROWS: dict[str, tuple[int, int, int, int, int, int, int]] = {
    "7×7 s2 stem": (3, 224, 64, 7, 2, 3, 1),
    "11×11 s4 stem": (3, 224, 64, 11, 4, 2, 1),
    "3×3 s2 stem": (3, 224, 32, 3, 2, 1, 1),
    "1×1 256→64@56": (256, 56, 64, 1, 1, 0, 1),
    "3×3 64@56": (64, 56, 64, 3, 1, 1, 1),
    "3×3 128@28": (128, 28, 128, 3, 1, 1, 1),
    "3×3 256@14": (256, 14, 256, 3, 1, 1, 1),
    "3×3 512@7": (512, 7, 512, 3, 1, 1, 1),
    "vgg 512@28": (512, 28, 512, 3, 1, 1, 1),
    "vgg 64@224": (64, 224, 64, 3, 1, 1, 1),
    "vgg 256@56": (256, 56, 256, 3, 1, 1, 1),
    "depthwise 96@112": (96, 112, 96, 3, 1, 1, 96),
    "depthwise 960@7": (960, 7, 960, 3, 1, 1, 960),
    "depthwise 5×5 240@28": (240, 28, 240, 5, 1, 2, 240),
    "32 groups 128@56": (128, 56, 128, 3, 1, 1, 32),
    "32 groups 256@28": (256, 28, 256, 3, 1, 1, 32),
    "32 groups 512@14": (512, 14, 512, 3, 1, 1, 32),
    "32 groups 1024@7": (1024, 7, 1024, 3, 1, 1, 32),
    "depthwise 7×7 96@56": (96, 56, 96, 7, 1, 3, 96),
    "3×3 s2 128@56": (128, 56, 128, 3, 2, 1, 1),
    "patches 16×16": (3, 224, 384, 16, 16, 0, 1),
    "patches 4×4": (3, 224, 96, 4, 4, 0, 1),
    "patches 2×2": (96, 56, 192, 2, 2, 0, 1),
}
BATCH = 4
LIMIT = 1.15
HOPELESS = 4.0  # a program so many times slower than the best is not timed on
TORCHS = ("torch", "torch, channels last")

# Programs that no rule uses, to see whether one should.
EXTRA = (
    blocks_program("blocks of 32", channels=32),
    blocks_program("blocks im2col", channels=32, inner=lambda shape: IM2COL),
)


@dataclass(frozen=True)
class Row:
    """What came out for one convolution."""

    name: str
    chosen: str  # by the rules
    best: str  # the fastest program
    ratio: float  # the chosen one's median over that of the best
    ratio_low: float  # lower end of its 95% confidence interval
    milliseconds: dict[str, float]  # medians by program, torch's among them

    @property
    def passed(self) -> bool:
        """Whether no program is clearly faster than the chosen one."""
        return self.ratio_low <= LIMIT


def compiled(program: ConvolutionAlgorithm, x: Any, w: Any, shape: ConvShape) -> Callable[[], Any]:
    """A call that waits for its result."""
    prepared = jax.block_until_ready(jax.jit(lambda w: program.prepare(w, shape))(w))
    executable = jax.jit(lambda x, p: program.apply(x, p, shape)).lower(x, prepared).compile()
    return lambda: jax.block_until_ready(executable(x, prepared))


def measure(name: str, rounds: int) -> Row:
    """Compiles and times the programs for one convolution."""
    c_in, size, c_out, k, stride, padding, groups = ROWS[name]
    generator = np.random.default_rng(0)
    x = generator.standard_normal((BATCH, size, size, c_in), np.float32)
    w = generator.standard_normal((c_out, c_in // groups, k, k), np.float32)
    options: dict[str, Any] = {"stride": (stride,) * 2, "padding": (padding,) * 2}
    options |= {"dilation": (1, 1), "groups": groups}
    xj, wj = jax.numpy.asarray(x), jax.numpy.asarray(w)
    shape = ConvShape.of(xj, wj, **options)
    chosen = choose_rule(shape).program.name
    calls = {p.name: compiled(p, xj, wj, shape) for p in (*PROGRAMS, *EXTRA) if p.applies(shape)}
    first = harness.time_candidates(calls, rounds=3, pause_s=0.0)
    fastest = min(timing.median for timing in first.values())
    calls = {n: c for n, c in calls.items() if first[n].median < HOPELESS * fastest or n == chosen}
    programs = list(calls)
    for kind, layout in zip(TORCHS, (torch.contiguous_format, torch.channels_last), strict=True):
        xt = torch.from_numpy(x).movedim(-1, 1).contiguous(memory_format=layout)
        wt = torch.from_numpy(w).contiguous(memory_format=layout)
        calls[kind] = functools.partial(F.conv2d, xt, wt, None, **options)
    with torch.inference_mode():
        timings = harness.time_candidates(calls, rounds, baseline=chosen)
    best = max(programs, key=lambda program: timings[program].speedup.value)
    ratio = timings[best].speedup
    medians = {kind: timing.median * 1e3 for kind, timing in timings.items()}
    return Row(name, chosen, best, ratio.value, ratio.low, medians)


def table(rows: Sequence[Row]) -> Table:
    """One line per convolution."""
    lines = []
    for row in rows:
        of = row.milliseconds
        lines.append([
            row.name, *(f"{of[kind]:.2f}" for kind in TORCHS), row.chosen, f"{of[row.chosen]:.2f}",
            row.best, f"{of[row.best]:.2f}", f"{row.ratio:.2f}",
            "[green]pass[/]" if row.passed else "[red]FAIL[/]",
        ])  # fmt: skip
    heads = "convolution", *TORCHS, "chosen", "ms", "best", "ms", "ratio", ""
    title = f"convolution programs on CPU, float32, batch {BATCH}, medians in ms"
    return harness.table(heads, lines, title)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.arguments(__doc__, rounds=20)
    parser.add_argument("--only", default="", help="measure the rows whose name contains this")
    settings = parser.parse_args(arguments)
    console = harness.announce()
    names = [name for name in ROWS if settings.only in name]
    if not names:
        text = f"no row is named like {settings.only!r}; there are: {', '.join(ROWS)}"
        return harness.refused(text, console)
    rows = [measure(n, settings.rounds) for n in track(names, console=console, transient=True)]
    console.print(table(rows))
    if settings.json:
        harness.save_json(settings.json, "convolutions", [asdict(row) for row in rows])
    mean = harness.geometric_mean(row.ratio for row in rows)
    passed = sum(row.passed for row in rows)
    console.print(f"{passed} of {len(rows)} rows pass; mean ratio {mean:.3f}")
    return int(passed < len(rows))


if __name__ == "__main__":
    raise SystemExit(main())

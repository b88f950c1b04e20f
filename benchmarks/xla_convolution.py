"""Does the rule table pick the fastest XLA program for each convolution?

    python benchmarks/xla_convolution.py [--json PATH] [--only NAME]

Every program that is right for a shape is compiled with its weights prepared ahead and timed,
interleaved and in random order; torch is timed in between, after a pause, because its threads
spin on for a while. A row passes if the chosen program takes at most 1.15 times as long as the
best one. The exit status is 1 if a row fails.
"""

import argparse
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from dynamo_backends.xla.lowering.convolution_dense import IM2COL
from dynamo_backends.xla.lowering.convolution_programs import (
    PROGRAMS,
    ConvolutionProgram,
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
SECONDS_PER_ROW = 1.6  # of measuring, beside compiling
PAUSE = 0.03  # torch's OpenMP threads spin for about 8 ms after their work
HOPELESS = 4.0  # a program so many times slower than the best is not measured on

# Programs that no rule uses, to see whether one should.
EXTRA = (
    blocks_program("blocks of 32", channels=32),
    blocks_program("blocks im2col", channels=32, inner=lambda shape: IM2COL),
)


@dataclass
class Row:
    """What came out for one convolution; times are medians in milliseconds."""

    name: str
    chosen: str
    reason: str
    times: dict[str, float]
    compile_seconds: dict[str, float]
    torch_nchw: float
    torch_nhwc: float
    best: str = field(init=False)
    ratio: float = field(init=False)

    def __post_init__(self) -> None:
        self.best = min(self.times, key=self.times.__getitem__)
        self.ratio = self.times[self.chosen] / self.times[self.best]

    @property
    def passed(self) -> bool:
        return self.ratio <= LIMIT


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def compiled(
    program: ConvolutionProgram, x: jax.Array, w: jax.Array, shape: ConvShape
) -> tuple[Callable[[], object], float]:
    """A call that waits for its result, and the seconds that compiling took."""
    prepared = jax.block_until_ready(jax.jit(lambda w: program.prepare(w, shape))(w))
    start = time.perf_counter()
    executable = jax.jit(lambda x, p: program.apply(x, p, shape)).lower(x, prepared).compile()
    seconds = time.perf_counter() - start
    return lambda: jax.block_until_ready(executable(x, prepared)), seconds


def rounds(
    calls: dict[str, Callable[[], object]], seconds: float, samples: dict[str, list[float]]
) -> None:
    """Time all calls in random order, again and again, for about ``seconds``."""
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name in random.sample(list(calls), len(calls)):
            samples[name].append(timed(calls[name]))
        fastest = min(min(samples[name]) for name in calls)
        calls = {n: c for n, c in calls.items() if min(samples[n]) < HOPELESS * fastest}


def head_to_head(first: Callable[[], object], second: Callable[[], object]) -> float:
    """Median ratio of the two times in direct succession, which other load cannot tilt."""
    ratios: list[float] = []
    end = time.perf_counter() + SECONDS_PER_ROW
    while time.perf_counter() < end or len(ratios) < 7:
        pair = [first, second]
        if flip := random.random() < 0.5:
            pair.reverse()
        a, b = (timed(call) for call in pair)
        ratios.append(b / a if flip else a / b)
    return statistics.median(ratios)


def measure(name: str) -> Row:
    c_in, size, c_out, k, stride, padding, groups = ROWS[name]
    generator = np.random.default_rng(0)
    x = generator.standard_normal((BATCH, size, size, c_in), np.float32)
    w = generator.standard_normal((c_out, c_in // groups, k, k), np.float32)
    options: dict[str, Any] = {
        "stride": (stride,) * 2,
        "padding": (padding,) * 2,
        "dilation": (1, 1),
        "groups": groups,
    }
    xj, wj = jax.numpy.asarray(x), jax.numpy.asarray(w)
    shape = ConvShape.of(xj, wj, **options)
    rule = choose_rule(shape)
    calls, compile_seconds = {}, {}
    for program in (*PROGRAMS, *EXTRA):
        if program.applies(shape):
            calls[program.name], compile_seconds[program.name] = compiled(program, xj, wj, shape)
    xt, wt = torch.from_numpy(x).movedim(-1, 1), torch.from_numpy(w)
    plain = xt.contiguous()
    last = xt.contiguous(memory_format=torch.channels_last)
    wt_last = wt.contiguous(memory_format=torch.channels_last)
    torch_calls: dict[str, Callable[[], object]] = {
        "nchw": lambda: F.conv2d(plain, wt, None, **options),
        "nhwc": lambda: F.conv2d(last, wt_last, None, **options),
    }
    samples: dict[str, list[float]] = {name: [] for name in (*calls, *torch_calls)}
    with torch.inference_mode():
        for _ in range(2):
            rounds(calls, SECONDS_PER_ROW / 2, samples)
            rounds(torch_calls, SECONDS_PER_ROW / 12, samples)
            time.sleep(PAUSE)
    median = {name: statistics.median(times) for name, times in samples.items()}
    row = Row(
        name=name,
        chosen=rule.program.name,
        reason=rule.reason,
        times={name: median[name] for name in calls},
        compile_seconds=compile_seconds,
        torch_nchw=median["nchw"],
        torch_nhwc=median["nhwc"],
    )
    if not row.passed:  # doubtful: once more, only these two
        row.ratio = max(1.0, head_to_head(calls[row.chosen], calls[row.best]))
    return row


def render(rows: list[Row]) -> Table:
    table = Table(
        title=f"Convolution programs on CPU, float32, batch {BATCH}, medians in ms "
        f"({torch.get_num_threads()} threads)"
    )
    for heading in ("convolution", "torch", "ch. last", "chosen", "ms", "best", "ms", "ratio", ""):
        table.add_column(heading, justify="left" if heading in ("chosen", "best") else "right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.torch_nchw:.2f}",
            f"{row.torch_nhwc:.2f}",
            row.chosen,
            f"{row.times[row.chosen]:.2f}",
            row.best,
            f"{row.times[row.best]:.2f}",
            f"{row.ratio:.2f}",
            "[green]pass[/]" if row.passed else "[red]FAIL[/]",
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write every time to this file")
    parser.add_argument("--only", help="measure the rows whose name contains this")
    arguments = parser.parse_args()
    console = Console()
    if os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1):
        console.print("[yellow]other programs are running: trust the ratios, not the times[/]")
    console.width = max(console.width, 110)  # piped into a file, names would be cut
    rows: list[Row] = []
    with console.status("") as status:
        for name in ROWS:
            if arguments.only and arguments.only not in name:
                continue
            status.update(f"{name} ({len(rows) + 1} of {len(ROWS)})")
            rows.append(measure(name))
    if not rows:
        console.print(f"no row is named like {arguments.only!r}; there are: {', '.join(ROWS)}")
        return 2
    console.print(render(rows))
    if arguments.json:
        data = [{**asdict(row), "passed": row.passed} for row in rows]
        arguments.json.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    failed = [row for row in rows if not row.passed]
    mean = math.exp(statistics.fmean(math.log(row.ratio) for row in rows))
    console.print(f"{len(rows) - len(failed)} of {len(rows)} rows pass; mean ratio {mean:.3f}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

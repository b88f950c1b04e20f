"""AdamW steps of a BERT on a device that shares no memory with torch, against `jax.jit` by hand.

    python benchmarks/device_steps.py
    python benchmarks/device_steps.py --layers 12 --width 768 --vocabulary 30522 --rounds 5

The device is the tests' double: XLA's client of the CPU, which counts what is moved. The model is
moved there once, and `compile_step` trains it; the other loop is what one would write for jax, with
the same formulas, donated arrays and as many threads. Both take the same 50 steps first, in which
losses have to agree and transfers are counted: up go the batches, and down the losses that are
read, every tenth. Then they are timed interleaved, ten steps a sample, of which the last loss is
read. The exit status is 1 if the steps of `compile_step` are slower than 0.95 times the others.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))  # the double is the tests'

import harness
from dynamo_backends import compile_step
from dynamo_backends.xla import to_device
from networks import Encoder
from tests.doubles.remote import remote_double

STEPS, READ = 50, 10
"""Steps whose losses are compared; after how many one is read. A sample is `READ` steps."""

OURS, BY_HAND = "compile_step on the double", "jax.jit by hand"
LEAST_RATIO = 0.95
TOLERANCE = 1e-3

Batch = tuple[Tensor, Tensor]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if a target is missed."""
    settings = parse(arguments)
    console = harness.announce()
    os.environ.setdefault("PJRT_NPROC", str(torch.get_num_threads()))  # of both clients of XLA
    batches = make_batches(settings)
    record = measured(settings, batches)
    found = problems(record, tuple(batches[0][0].shape))
    harness.report(published, settings, "device_steps", [record], console)
    console.print(
        f"{STEPS} steps: {len(record['uploads'])} uploads, {len(record['downloads'])} downloads; "
        f"{record['uploads_of_state']} uploads of the state before them"
    )
    for text in found:
        console.print(f"[red]{text}[/]")
    return int(bool(found))


def measured(settings: argparse.Namespace, batches: Sequence[Batch]) -> dict[str, Any]:
    """Times of both loops, and what `problems` looks at."""
    device = remote_double()
    model, optimizer = make_model(settings)
    by_hand = hand_written_loop(model, optimizer, batches)
    ours = compiled_loop(model, optimizer, batches)
    next(by_hand)
    with device.traffic.counted() as state:
        next(ours)
    with device.traffic.counted() as traffic:
        losses = [next(ours) for _ in range(STEPS // READ)]
    expected = [next(by_hand) for _ in range(STEPS // READ)]
    loops: dict[str, Callable[[], Any]] = {
        BY_HAND: lambda: next(by_hand), OURS: lambda: next(ours)
    }  # fmt: skip
    clock = time.process_time if settings.processor_time else time.perf_counter
    timings = harness.time_candidates(loops, settings.rounds, warmup=1, lead_in=0, clock=clock)
    speedup = timings[OURS].speedup
    return {
        "ms": {name: timing.median * 1e3 / READ for name, timing in timings.items()},
        "ratio": speedup.value,
        "ratio_95": [speedup.low, speedup.high],
        "losses": {OURS: losses, BY_HAND: expected},
        "uploads_of_state": len(state.uploads) - 2 * READ,
        "uploads": list(map(list, traffic.uploads)),
        "downloads": list(map(list, traffic.downloads)),
    }


def make_batches(settings: argparse.Namespace) -> list[Batch]:
    """Words and targets of `READ` steps, which are repeated."""
    torch.manual_seed(1)
    shape = settings.vocabulary, (settings.batch, settings.length)
    return [(torch.randint(*shape), torch.randint(*shape)) for _ in range(READ)]


def make_model(settings: argparse.Namespace) -> tuple[Encoder, torch.optim.AdamW]:
    """An encoder and its optimizer, the same at each call."""
    torch.manual_seed(0)
    sizes = (getattr(settings, n) for n in ("vocabulary", "length", "width", "heads", "layers"))
    model = Encoder(*sizes)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)


def compiled_loop(
    model: Encoder, optimizer: torch.optim.AdamW, batches: Sequence[Batch]
) -> Iterator[float]:
    """Moves a model to the double, and trains it there; gives the loss of every tenth step."""
    to_device(model, "remote")

    def train(ids: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = compile_step(train, model=model, optimizer=optimizer)
    while True:
        for batch in batches:
            loss = step(*batch)
        yield loss.item()


def hand_written_loop(
    model: Encoder, optimizer: torch.optim.AdamW, batches: Sequence[Batch]
) -> Iterator[float]:
    """Trains a copy of a model by jax; gives the loss of every tenth step."""
    import jax

    from harness.by_hand import HandWrittenSteps

    step = HandWrittenSteps(model, optimizer, jax.devices("cpu")[0])
    given = [tuple(x.to(torch.int32).numpy() for x in batch) for batch in batches]

    def loop() -> Iterator[float]:
        while True:
            for ids, targets in given:
                loss = step(ids, targets)
            yield float(loss)

    return loop()


def problems(record: dict[str, Any], shape: tuple[int, ...]) -> list[str]:
    """Which targets are missed by what was measured with batches of a shape."""
    found = []
    if (ratio := record["ratio"]) < LEAST_RATIO:
        slow = f"{OURS} is {ratio:.2f} times as fast as {BY_HAND}"
        found.append(f"{slow}; at least {LEAST_RATIO} is wanted")
    for ours, expected in zip(*(record["losses"][n] for n in (OURS, BY_HAND)), strict=True):
        if not abs(ours - expected) <= TOLERANCE * abs(expected):
            found.append(f"a loss is {ours}, and {expected} by hand")
    uploads = record["uploads"]
    others = sum(x != list(shape) for x in uploads)
    if others or len(uploads) != 2 * STEPS:
        found.append(
            f"{len(uploads)} uploads, {others} of them no batches; the batches are {2 * STEPS}"
        )
    if record["downloads"] != [[]] * (STEPS // READ):
        found.append(f"{len(record['downloads'])} downloads; {STEPS // READ} losses were read")
    return found


def published(content: Mapping[str, Any]) -> list[Table]:
    """Milliseconds of a step, and the ratio."""
    (record,) = content["results"]
    ratio = harness.format_ratio(harness.Ratio(record["ratio"], *record["ratio_95"]))
    rows = [[n, f"{ms:.2f}", ratio if n == OURS else ""] for n, ms in record["ms"].items()]
    heads = "", "ms a step", r"times as fast \[95% CI]"
    return [harness.table(heads, rows, "AdamW steps of an encoder on XLA's client of the CPU")]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = harness.arguments(__doc__, rounds=9)
    sizes = {
        "layers": 6, "width": 384, "heads": 6, "length": 64, "batch": 4, "vocabulary": 1000
    }  # fmt: skip
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="of all threads, which other processes disturb less than the time that passes",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())

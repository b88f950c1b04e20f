"""Training steps of several one-thread processes: against one, and against torch's DDP.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --models bert resnet18 --rounds 15 --json scaling.json
    python benchmarks/scaling.py --scale test --rounds 2

Each process has one thread and its own batch of the same size (weak scaling). Measured interleaved
in one job: `compile_step` in one process, while the others wait; `compile_step` on a mesh of all of
them, with parallel="ddp" and "fsdp"; and DistributedDataParallel under torch.compile with Inductor.
The optimizer is AdamW in float32, and a sample is as many steps as take half a second.

Two things bound weak scaling on one machine, and are measured beside: each process takes steps of
its own at the same time, without a mesh, so that they share caches and memory alone; and one
all-reduce of as many bytes as there are gradients, by torch's gloo. "limit" is what is left if
steps cost these two, one after the other.

A second table says what the first process's cores did in a step: time in the program and in the
kernel, and page faults (of memory that is taken from the system anew).
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

import dynamo_backends
import harness
import training
from dynamo_backends.bench.suites import call

MODELS = {name: training.MODELS[name] for name in ("bert", "resnet18", "vit_s_16", "gpt2")}

ONE = "compile_step, one process"
APART = "each for itself"
REDUCE = "all-reduce of gradients"
WAYS = (ONE, APART, REDUCE, "compile_step ddp", "compile_step fsdp", "DDP with inductor")
SAMPLE_S = 0.5


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if a process failed or losses differ."""
    parser = harness.model_arguments(__doc__, rounds=15, models=["bert"])
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    settings = parser.parse_args(arguments)
    if settings.child:
        return child(settings)
    console = harness.announce()
    if unknown := training.unknown_model(settings.models, MODELS):
        return harness.refused(unknown, console)
    rows, wrong = [], []
    for name in settings.models:
        found = run_job(name, settings)
        if isinstance(found, str):
            wrong.append(f"{name}: {found}")
            continue
        rows.append({"model": name, **found})
        if (text := mistake(found)) is not None:
            wrong.append(f"{name}: {text}")
    harness.report(published, settings, "scaling", rows, console)
    for text in wrong:
        console.print(f"[red]{text}[/]")
    return int(bool(wrong))


def run_job(name: str, settings: argparse.Namespace) -> dict[str, Any] | str:
    """Measures a model in processes of their own; what went wrong in words if something did."""
    port = str(harness.free_port())
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        flags = ["--models", name, "--scale", settings.scale, "--batch", str(settings.batch)]
        flags += ["--rounds", str(settings.rounds), "--child", str(result)]
        processes = []
        for rank in range(settings.processes):
            variables = {"RANK": str(rank), "WORLD_SIZE": str(settings.processes)}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
            variables["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor{rank}"
            command = [sys.executable, __file__, *flags]
            processes.append(subprocess.Popen(command, env={**os.environ, **variables}))
        statuses = [process.wait() for process in processes]
        if any(statuses):
            return f"its processes ended with {statuses}"
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return found


def child(settings: argparse.Namespace) -> int:
    """One process of a job; the first writes what was measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (name,) = settings.models
    case = harness.find_case(MODELS[name], name, settings.scale, settings.batch)
    mine = [way for way in WAYS if way != ONE or rank == 0]
    steps = {way: make_step(case, way) for way in mine}
    losses, counts = {}, {}
    for way in WAYS:
        losses[way], counts[way] = begin(steps.get(way))
    samples: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for turn in range(settings.rounds):
        for way in WAYS if turn % 2 else reversed(WAYS):
            samples[way].append(sample(steps.get(way), counts[way]))
    if rank == 0:
        found: dict[str, Any] = {
            kind: {way: statistics.median(x[kind] for x in samples[way]) for way in WAYS}
            for kind in samples[ONE][0]
        }
        text = json.dumps({**found, "losses": losses})
        Path(settings.child).write_text(text, encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    return 0


def begin(step: Callable[[], Tensor] | None) -> tuple[float, int]:
    """The loss after a few steps, and how many are a sample; the same on all processes."""
    loss, count = 0.0, torch.ones((), dtype=torch.int64)
    if step is not None:
        loss = [step().item() for _ in range(4)][-1]
        start = time.perf_counter()
        step().item()
        count = torch.tensor(max(1, round(SAMPLE_S / (time.perf_counter() - start))))
    dist.broadcast(count, 0)
    return loss, int(count)


def sample(step: Callable[[], Tensor] | None, count: int) -> dict[str, float]:
    """What one step takes, of so many that are taken one after the other."""
    dist.barrier()
    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    if step is not None:
        for _ in range(count):
            loss = step()
        loss.item()
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    dist.barrier()
    return {
        "milliseconds": seconds * 1e3 / count,
        "in the program": (after.ru_utime - before.ru_utime) * 1e3 / count,
        "in the kernel": (after.ru_stime - before.ru_stime) * 1e3 / count,
        "page faults": (after.ru_minflt - before.ru_minflt) / count,
    }


def make_step(case: harness.ModelCase, way: str) -> Callable[[], Tensor]:
    """A function without arguments that trains a model of its own by one step."""
    torch.manual_seed(0)
    model, batch = training.without_dropout(case), case.inputs()
    if way == REDUCE:
        return all_reduce(sum(p.numel() for p in model.parameters()))
    forward: Any = model
    if way.startswith("DDP"):
        forward = torch.compile(torch.nn.parallel.DistributedDataParallel(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def train(given: Any) -> Tensor:
        loss = training.loss_of(call(forward, given))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if way.startswith("DDP"):
        return lambda: train(batch)
    spread: dict[str, Any] = {"options": {"verify": "off"}}
    if way not in (ONE, APART):
        spread |= {"mesh": {"data": dist.get_world_size()}, "parallel": way.split()[-1]}
    step = dynamo_backends.compile_step(train, model=model, optimizer=optimizer, **spread)
    return lambda: step(batch)


def all_reduce(count: int) -> Callable[[], Tensor]:
    """A function that adds so many numbers of all processes."""
    numbers = torch.zeros(count)

    def run() -> Tensor:
        dist.all_reduce(numbers)
        return numbers[:1].sum()

    return run


def published(content: Mapping[str, Any]) -> list[Table]:
    """Medians in milliseconds, and what the cores of the first process did in a step (medians)."""
    results, processes = content["results"], content["settings"]["processes"]
    steps, cores = [], []
    for row in results:
        ms = row["milliseconds"]
        one, apart, reduce, ddp, fsdp, torchs = (ms[way] for way in WAYS)
        scaling = [f"{processes * one / taken:.2f}" for taken in (ddp, apart + reduce, fsdp)]
        ratios = *scaling, f"{torchs / min(ddp, fsdp):.2f}"
        steps.append([row["model"], *(f"{ms[way]:.1f}" for way in WAYS), *ratios])
        cores += [
            [row["model"], kind, *(f"{row[kind][way]:.0f}" for way in WAYS)]
            for kind in ("in the program", "in the kernel", "page faults")
        ]
    heads = "model", *WAYS, "weak scaling", "limit", "fsdp", "over DDP with inductor"
    title = f"steps of {processes} one-thread processes, milliseconds (medians)"
    of_cores = "the first process in a step: milliseconds of its cores, and page faults"
    return [
        harness.table(heads, steps, title),
        harness.table(("model", "", *WAYS), cores, of_cores, left=2),
    ]


def mistake(row: dict[str, Any]) -> str | None:
    """A loss that differs, in words; all processes have the same batch, so none should."""
    expected = row["losses"][ONE]
    for way, loss in row["losses"].items():
        if way != REDUCE and abs(loss - expected) > 1e-3 * max(1.0, abs(expected)):
            return f"{way}: loss {loss} instead of {expected}"
    return None


if __name__ == "__main__":
    raise SystemExit(main())

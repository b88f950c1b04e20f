"""What XLA's partitioner makes of a training step: bytes that each of n devices gets, and holds.

    python benchmarks/collectives.py
    python benchmarks/collectives.py --devices 2 8 --rows 256 4096

A CPU is divided into devices; what is printed is read off the compiled program, in multiples of the
bytes of all parameters. The model is two layers of a transformer's MLP, trained by AdamW.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

import harness
from dynamo_backends import compile_step

WIDTH, HIDDEN = 512, 2048


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what was counted; returns 0."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[8])
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 4096], help="of the batch")
    settings = parser.parse_args(arguments)
    console = harness.make_console()
    every = list(itertools.product(settings.devices, settings.rows, ("ddp", "fsdp", "tensor")))
    records = [
        {"devices": devices, "rows": rows, "parallel": kind, **counted(kind, devices, rows)}
        for devices, rows, kind in track(every, "compiling", console=console, transient=True)
    ]
    harness.report(published, settings, "collectives", records, console)
    return 0


def counted(kind: str, devices: int, rows: int) -> dict[str, Any]:
    """What a step exchanges and holds, in multiples of the bytes of its parameters."""
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters())

    def train(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    spread: dict[str, Any] = {"mesh": {"data": devices}, "parallel": kind}
    if kind == "tensor":
        placements = {"0.*": [Replicate(), Shard(0)], "2.weight": [Replicate(), Shard(1)]}
        spread = {"mesh": {"data": 1, "model": devices}, "placements": placements}
    options = {"verify": "off"}
    step = compile_step(train, model=model, optimizer=optimizer, options=options, **spread)
    step(torch.randn(rows, WIDTH))
    report = step.reports[0].mesh
    assert report is not None
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    exchanged = {c.kind: c.bytes / size for c in report.collectives}
    return {"exchanged": exchanged, "held": report.argument_bytes / size}


def published(content: Mapping[str, Any]) -> list[Table]:
    """A line for each number of devices, batch and way of spreading a step."""
    rows = []
    for r in content["results"]:
        exchanged = ", ".join(f"{kind} {share:.2f}" for kind, share in r["exchanged"].items())
        case = str(r["devices"]), str(r["rows"]), r["parallel"]
        rows.append([*case, exchanged, f"{r['held']:.2f}"])
    heads = "devices", "rows of the batch", "parallel", "a device gets", "a device holds"
    return [harness.table(heads, rows)]


if __name__ == "__main__":
    raise SystemExit(main())

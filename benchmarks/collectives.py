"""What XLA's partitioner makes of a training step: bytes that each of n devices gets, and holds.

    python benchmarks/collectives.py
    python benchmarks/collectives.py --devices 2 8 --rows 256 4096

A CPU is divided into devices; what is printed is read off the compiled program, in multiples of the
bytes of all parameters. The model is two layers of a transformer's MLP, trained by AdamW.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

import harness
from dynamo_backends import compile_step
from dynamo_backends.interface.mesh import MeshReport

WIDTH, HIDDEN = 512, 2048


def settings(kind: str, devices: int) -> dict[str, Any]:
    """The arguments of `compile_step` for a way of spreading a step."""
    if kind != "tensor":
        return {"mesh": {"data": devices}, "parallel": kind}
    placements = {"0.*": [Replicate(), Shard(0)], "2.weight": [Replicate(), Shard(1)]}
    return {"mesh": {"data": 1, "model": devices}, "placements": placements}


def compiled(kind: str, devices: int, rows: int) -> tuple[MeshReport, int]:
    """The report of a step, and the bytes of its parameters."""
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters())

    def train(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    options = {"verify": "off"}
    spread = settings(kind, devices)
    step = compile_step(train, model=model, optimizer=optimizer, options=options, **spread)
    step(torch.randn(rows, WIDTH))
    report = step.reports[0].mesh
    assert report is not None
    return report, sum(p.numel() * p.element_size() for p in model.parameters())


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--devices", type=int, nargs="+", default=[8])
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 4096], help="of the batch")
    parser.add_argument("--json", metavar="FILE", help="save the results")
    given = parser.parse_args()
    found = [
        {"devices": devices, "rows": rows, "parallel": kind, **counted(kind, devices, rows)}
        for devices in given.devices
        for rows in given.rows
        for kind in ("ddp", "fsdp", "tensor")
    ]
    harness.make_console().print(table(found))
    if given.json:
        harness.save_json(given.json, "collectives", found, settings=vars(given))


def counted(kind: str, devices: int, rows: int) -> dict[str, Any]:
    """What a step exchanges and holds, in multiples of the bytes of the parameters."""
    report, size = compiled(kind, devices, rows)
    exchanged = {c.kind: c.bytes / size for c in report.collectives}
    return {"exchanged": exchanged, "held": report.argument_bytes / size}


def table(records: Sequence[Mapping[str, Any]]) -> Table:
    """The results for people."""
    found = Table("devices", "rows of the batch", "parallel", "a device gets", "a device holds")
    for r in records:
        exchanged = ", ".join(f"{kind} {share:.2f}" for kind, share in r["exchanged"].items())
        devices, rows = str(r["devices"]), str(r["rows"])
        found.add_row(devices, rows, r["parallel"], exchanged, f"{r['held']:.2f}")
    return found


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """What a file of results says, for a page."""
    return [table(content["results"])]


if __name__ == "__main__":
    main()

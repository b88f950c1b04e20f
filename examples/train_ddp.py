"""Trains a classifier on several processes, each with its part of every batch.

    torchrun --nproc-per-node 2 examples/train_ddp.py
    torchrun --nproc-per-node 2 examples/train_ddp.py --parallel fsdp --checkpoint /tmp/points

The step is one program over all processes, and means what it means on one with the whole batch.
The checkpoint is read with any number of processes, or in eager.
"""

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dynamo_backends

FEATURES, CLASSES = 16, 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains; returns 0 if nine of ten points are put in their class, else 1."""
    settings = parse(arguments)
    dist.init_process_group("gloo")
    data = points()
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    train(model, data, settings)
    x, y = data.tensors
    with torch.no_grad():
        share = (model(x).argmax(1) == y).float().mean().item()
    if dist.get_rank() == 0:
        print(f"{share:.1%} of {len(data)} points are in their class", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if share >= 0.9 else 1


def points() -> TensorDataset:
    """Points around one centre for each class, the same on all processes."""
    drawn = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, FEATURES, generator=drawn)
    labels = torch.randint(CLASSES, (2048,), generator=drawn)
    return TensorDataset(
        centres[labels] + 0.5 * torch.randn(2048, FEATURES, generator=drawn), labels
    )


def train(model: nn.Module, data: TensorDataset, settings: argparse.Namespace) -> None:
    """Takes the steps, and writes a checkpoint if one is wanted."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def update(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = dynamo_backends.compile_step(
        update,
        model=model,
        optimizer=optimizer,
        mesh={"data": dist.get_world_size()},
        parallel=settings.parallel,
    )
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, 32, sampler=sampler, drop_last=True)
    for epoch in range(settings.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = step(x, y)  # this process's part; the loss is that of the whole batch
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)
    if settings.checkpoint:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.save(state, checkpoint_id=settings.checkpoint)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--parallel", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--checkpoint", default="", help="a folder to write to")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())

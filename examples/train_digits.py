"""Trains a small convolutional net on scikit-learn's handwritten digits, one graph per step.

    python examples/train_digits.py
    python examples/train_digits.py --backend inductor --epochs 5

Forward, backward, clipping and the optimizer's update are one XLA program. The learning rate
follows a cosine and is an input of it, so it is compiled once.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import dynamo_backends

BATCH = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains and tests; returns 0 if 97% of the test images are recognised, else 1."""
    settings = parse(arguments)
    console = Console()
    try:
        training, test = load_digits()
    except ModuleNotFoundError as error:
        console.print(f"[red]{error}[/]")
        return 2
    start = time.perf_counter()
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        given = training, settings.epochs, settings.backend, progress, settings.precision
        model, step, _ = train(*given)
    seconds = time.perf_counter() - start
    accuracy = recognised(model, test)
    title = f"training on {len(training[1])} handwritten digits, one graph per step"
    table = Table("backend", "steps", "seconds", "compilations", "recognised", title=title)
    counts = f"{step.launches}", f"{seconds:.1f}", f"{step.compilations}"
    table.add_row(settings.backend, *counts, f"{accuracy:.1%} of {len(test[1])} test images")
    console.print(table)
    return 0 if accuracy >= 0.97 else 1


def train(
    data: tuple[Tensor, Tensor],
    epochs: int,
    backend: str,
    progress: Progress,
    precision: Any = "float32",
) -> tuple[nn.Module, dynamo_backends.Step, list[float]]:
    """Trains the net; returns it, the compiled step, and the losses.

    Args:
        data: Images [n, 1, 8, 8] and their digits [n].
        epochs: How often each image is seen.
        backend: Of `compile_step`.
        progress: Where to show it.
        precision: Of `compile_step`.
    """
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    images, digits = data
    batches = len(images) // BATCH
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * batches)

    def update(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y, label_smoothing=0.05)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = dynamo_backends.compile_step(
        update, model=model, optimizer=optimizer, backend=backend, precision=precision
    )
    task = progress.add_task("compiling", total=epochs * batches)
    losses = []
    for _ in range(epochs):
        for rows in torch.randperm(len(images))[: batches * BATCH].split(BATCH):
            losses.append(step(images[rows], digits[rows]).item())
            schedule.step()
            progress.update(task, advance=1, description=f"loss {losses[-1]:.3f}")
    return model, step, losses


def network() -> nn.Module:
    """A convolutional net for images of 8x8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(64 * 16, 10),
    )


def recognised(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    """The part of the images whose digit the model finds, in eager."""
    images, digits = data
    model.eval()
    with torch.no_grad():
        return (model(images).argmax(1) == digits).float().mean().item()


def load_digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Images and digits to train with, and others to test with: 1437 and 360.

    Raises:
        ModuleNotFoundError: scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        raise ModuleNotFoundError(
            "the digits come with scikit-learn: pip install scikit-learn"
        ) from error
    images, digits = load(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x = (torch.tensor(images, dtype=torch.float32) / 16 - 0.3).view(-1, 1, 8, 8)[order]
    y = torch.tensor(digits)[order]
    count = len(x) * 4 // 5
    return (x[:count], y[:count]), (x[count:], y[count:])


def parse(arguments: Sequence[str] | None) -> Any:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="openxla")
    parser.add_argument("--precision", default="float32", choices=["float32", "bf16"])
    parser.add_argument("--epochs", type=int, default=12)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())

"""Trains on handwritten digits with Lightning, compiled in two ways.

    python examples/train_lightning.py
    python examples/train_lightning.py --epochs 4 --backend inductor

With automatic optimisation Lightning calls backward and the optimizer, so the model is compiled and
its forward and backward are two graphs. With manual optimisation the whole step is ours: one graph,
by `compile_step`. Both are compared with the same training in eager.
"""

import argparse
import contextlib
import logging
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import dynamo_backends
from dynamo_backends.bench.torchvision_shim import import_torchvision

BATCH = 128

with contextlib.suppress(ModuleNotFoundError):
    import_torchvision()  # Lightning's metrics do, which fails beside some torch builds
try:
    import lightning
except ModuleNotFoundError:
    lightning = None
Base: Any = lightning.LightningModule if lightning is not None else nn.Module


class Digits(Base):
    """A classifier of images of 8x8 pixels, with automatic optimisation.

    Args:
        backend: What compiles the model; None: eager.
    """

    def __init__(self, backend: str | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 10)
        )
        self.backend = backend
        self.losses: list[float] = []
        self.scores = torch.compile(self.net, backend=backend) if backend else self.net

    def training_step(self, batch: Sequence[Tensor], number: int) -> Tensor:
        """The loss of a batch; Lightning does the rest."""
        loss = F.cross_entropy(self.scores(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return torch.optim.AdamW(self.net.parameters(), lr=3e-3)


class DigitsInOneGraph(Digits):
    """The same, whose whole step is one graph.

    Lightning counts steps where its own optimizer is called, which is not so here: limit the
    training by epochs (`max_epochs`), not by steps.
    """

    def __init__(self, backend: str) -> None:
        super().__init__(None)
        self.automatic_optimization = False
        self.backend = backend
        self.step: Any = None

    def on_train_start(self) -> None:
        """Compiles the step, once model and optimizer are where they will be."""
        optimizer = self.optimizers(use_pl_optimizer=False)

        def update(images: Tensor, digits: Tensor) -> Tensor:
            loss = F.cross_entropy(self.net(images), digits)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        self.step = dynamo_backends.compile_step(
            update, model=self.net, optimizer=optimizer, backend=self.backend
        )

    def training_step(self, batch: Sequence[Tensor], number: int) -> None:
        """Takes a step."""
        self.losses.append(self.step(*batch).item())


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains three times; returns 0 if all agree and learn, 1 if not, 2 if a package is missing."""
    settings = parse(arguments)
    console = Console()
    if lightning is None:
        console.print("[red]Lightning is not installed. Run: pip install lightning[/]")
        return 2
    ways = {
        "eager": lambda: Digits(None),
        f"torch.compile, {settings.backend}": lambda: Digits(settings.backend),
        f"compile_step, {settings.backend}": lambda: DigitsInOneGraph(settings.backend),
    }
    table = Table("training", "steps", "first loss", "last loss", "from eager's", "recognised")
    expected: list[float] = []
    good = True
    for name, make in ways.items():
        with console.status(name):
            module = train(make(), settings.epochs)
            part = recognised(module)
        losses = module.losses
        expected = expected or losses
        worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        good &= worst < 1e-3 and losses[-1] < losses[0] / 2
        numbers = f"{len(losses)}", f"{losses[0]:.3f}", f"{losses[-1]:.3f}", f"{worst:.1e}"
        table.add_row(name, *numbers, f"{part:.1%}")
    console.print(table)
    return 0 if good else 1


def train(module: Any, epochs: int) -> Any:
    """Trains a module with Lightning, silently; returns it."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    images, digits = load_digits()
    data = torch.utils.data.TensorDataset(images, digits)
    loader = torch.utils.data.DataLoader(data, BATCH, drop_last=True)
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The 'train_dataloader' does not have many workers")
        # Lightning's own use of torch's pytree
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated")
        trainer.fit(module, loader)
    return module


def recognised(module: Any) -> float:
    """The part of the images whose digit is found, in eager."""
    images, digits = load_digits()
    module.net.eval()
    with torch.no_grad():
        return (module.net(images).argmax(1) == digits).float().mean().item()


def load_digits() -> tuple[Tensor, Tensor]:
    """Images [1797, 1, 8, 8] and their digits."""
    from sklearn.datasets import load_digits as load

    images, digits = load(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32) / 16 - 0.3
    return x.view(-1, 1, 8, 8), torch.tensor(digits)


def parse(arguments: Sequence[str] | None) -> Any:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="openxla")
    parser.add_argument("--epochs", type=int, default=4)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())

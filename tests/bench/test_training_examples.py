"""The training examples learn, by one graph per step."""

import pytest

from tests.bench.programs import load


def test_digits_are_recognised(capsys: pytest.CaptureFixture[str]) -> None:
    example = load("examples/train_digits.py")
    assert example.main(["--epochs", "8"]) == 0
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines()]
    (row,) = [[cell.strip() for cell in row] for row in rows if len(row) > 4]
    assert row[1:3] == ["openxla", "176"]
    assert row[4] == "1", "compilations"
    assert row[5].endswith("% of 360 test images")


def test_digits_that_are_not_learned_give_exit_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert load("examples/train_digits.py").main(["--epochs", "0", "--backend", "aot_eager"]) == 1


@pytest.mark.long
def test_verse_is_learned(capsys: pytest.CaptureFixture[str]) -> None:
    example = load("examples/train_text.py")
    assert example.main(["--steps", "150", "--guessed-part", "0.65"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "openxla: 150 steps" in shown
    assert "1 compilation" in shown


def test_text_is_split_into_passages_and_what_follows() -> None:
    example = load("examples/train_text.py")
    text = example.Text("abcabcabc" * 20)
    tokens, following = text.batch()
    assert tokens.shape == following.shape == (example.BATCH, example.CONTEXT)
    assert text.read(tokens[0].tolist())[1:] == text.read(following[0].tolist())[:-1]

"""Generation: eager's tokens, with a cache that stays where it is and nothing compiled late."""

import pytest
import torch

from harness.generators import ARCHITECTURES
from tests.bench.programs import load


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()


@pytest.mark.parametrize("architecture", ["llama", "t5"])
def test_tokens_are_those_of_eager_and_one_prompt_compiles_all(architecture: str):
    case = ARCHITECTURES[architecture]
    model = case.make(1, 32).double()
    prompts = case.prompts(model, (5, 11))
    assert load("benchmarks/generation.py").check(model, "openxla", "static", prompts, 5) == (0, 0)


def test_the_example_samples_what_eager_does(capsys: pytest.CaptureFixture[str]):
    flags = ["--layers", "1", "--features", "32", "--tokens", "5", "--prompts", "6", "9"]
    assert load("examples/generate.py").main([*flags, "--sample"]) == 0
    assert "tokens/s" in capsys.readouterr().out

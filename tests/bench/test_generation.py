"""Generation: eager's tokens, with a cache that stays where it is and nothing compiled late."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dynamo_backends.bench.suites.generators import ARCHITECTURES
from harness import decoding
from tests.bench.programs import load


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()


@pytest.mark.parametrize("architecture", ["llama", "t5"])
def test_tokens_are_those_of_eager_and_one_prompt_compiles_all(architecture: str):
    case = ARCHITECTURES[architecture]
    model = case.make(1, 32).double()
    prompts = case.prompts(model, (5, 11))
    found = decoding.check(model, "openxla", "static", prompts, 5)
    assert found == {"wrong": 0, "late": 0, "in_eager": 0}


@pytest.mark.long
def test_the_cache_is_copied_where_others_see_it_and_nowhere_else():
    alone, seen = (decoding.speed(c, (1, 32), 4, 1, 64) for c in ("openxla", "openxla@copying"))
    assert (alone["copies"], seen["copies"]) == (0, 2)
    assert alone["donated_megabytes"] >= alone["cache_megabytes"]
    assert alone["temporary_megabytes"] < alone["cache_megabytes"]


def row(**found: object) -> dict[str, object]:
    return {"eager": 10.0, "compiled": 20.0, **found}


def test_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    program = load("benchmarks/generation.py")
    measured: list[str] = []

    def fails_once(settings: object, name: str) -> dict[str, Any]:
        measured.append(name)
        if name.endswith("/ov") and len(measured) < 3:
            return {"error": "no memory"}
        is_ov = name.endswith("/ov")
        return row(wrong=0, late=int(is_ov), in_eager=2 * is_ov)

    monkeypatch.setattr(program, "in_a_process", fails_once)
    file = tmp_path / "results.json"
    flags = ["--scale", "test", "--parts", "tokens", "--models", "mamba", "--json", str(file)]
    flags += ["--backends", "openxla", "ov"]

    def shown() -> list[str]:
        (table,) = program.published(json.loads(file.read_text()))
        return [next(iter(column.cells)) for column in table.columns]

    assert program.main(flags) == 1
    assert shown() == ["mamba", "default", "right", "fails"]
    assert program.main(flags) == 1
    assert shown() == ["mamba", "default", "right", "1 compiled late (2 in eager)"]
    tried = [name.rpartition("/")[2] for name in measured]
    assert tried == ["openxla", "ov", "ov"], "what failed is tried again"
    assert program.main([*flags, "--rounds", "9"]) == 2
    assert "were measured under other conditions" in " ".join(capsys.readouterr().out.split())


def test_what_is_not_timed_has_no_speed(monkeypatch: pytest.MonkeyPatch):
    dtypes: list[torch.dtype] = []

    def checked(model: nn.Module, *_: object) -> dict[str, int]:
        dtypes.append(next(model.parameters()).dtype)
        return {"wrong": 0, "late": 0, "in_eager": 1}

    monkeypatch.setattr(decoding, "check", checked)
    found = {
        f"tokens/gpt2/static/{backend}":
            decoding.check_and_time("gpt2", backend, "static", (1, 32), 2, 0)
        for backend in ("openxla", "ov")
    }  # fmt: skip
    assert dtypes == [torch.float64, torch.float32], "OpenVINO has no float64"
    table = load("benchmarks/generation.py").cells_table(found)
    assert [list(column.cells) for column in table.columns[5:]] == [["1"] * 2, *[["-"] * 2] * 4]


def test_the_second_part_is_of_each_length_and_compares_with_inductor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    program = load("benchmarks/generation.py")
    steps = {"inductor": 20.0, "openxla": 10.0}

    def measured(settings: object, name: str) -> dict[str, object]:
        step_ms = steps[name.rpartition("/")[2]]
        return row(step_ms=step_ms, stream_ms=8.0, tokens=50.0, copies=0.0)

    monkeypatch.setattr(program, "in_a_process", measured)
    assert program.main(["--parts", "speed", "--columns", "inductor", "openxla"]) == 0
    lines = [x for x in capsys.readouterr().out.splitlines() if "openxla" in x]
    assert len(lines) == 2, "a short cache and a long one"
    assert all("2.00" in line and "1.25" in line for line in lines)


@pytest.mark.long
def test_the_example_samples_what_eager_does(capsys: pytest.CaptureFixture[str]):
    flags = ["--layers", "1", "--features", "32", "--tokens", "5", "--prompts", "6", "9"]
    assert load("examples/generate.py").main([*flags, "--sample"]) == 0
    assert "tokens/s" in capsys.readouterr().out

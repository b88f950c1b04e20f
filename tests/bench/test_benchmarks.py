"""The benchmark programs load and read their command lines; running them is no test's business."""

from pathlib import Path

import pytest

from harness.cells import Row
from tests.bench.programs import ROOT, load

PROGRAMS = (
    "xla_inference",
    "call_overhead",
    "compile_time",
    "cache_start",
    "memory",
    "vendor_parity",
    "thread_pools",
    "training",
    "training_memory",
    "autotune",
    "generation",
    "scaling",
)


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_loads_and_has_defaults(name: str) -> None:
    settings = load(f"benchmarks/{name}.py").parse([])
    assert settings.rounds > 1
    assert settings.json is None


def test_unknown_model_gets_help_and_exit_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert load("benchmarks/xla_inference.py").main(["--models", "resnet8"]) == 2
    assert "Did you mean 'resnet18'?" in capsys.readouterr().out


def test_every_program_says_how_to_run_it() -> None:
    for name in PROGRAMS:
        assert f"python benchmarks/{name}.py" in (ROOT / f"benchmarks/{name}.py").read_text()


def test_autotune_is_measured_beside_its_candidates_and_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = load("benchmarks/autotune.py")
    file = str(tmp_path / "results.json")
    flags = ["--scale", "test", "--rounds", "3", "--backend", "ltc", "--suite", "recurrent"]
    flags += ["--models", "rnn_relu", "gru", "--json", file]
    program.main([*flags, "--budget", "0.001"])
    first = capsys.readouterr().out
    assert "1 models are left; the same command goes on" in first
    program.main(flags)
    second = capsys.readouterr().out
    (name, other) = (line.split()[0] for line in (first + second).splitlines() if ": ltc " in line)
    assert {name, other} == {"rnn_relu:", "gru:"}
    assert "geometric mean" in second
    assert program.main([*flags, "--precision", "bf16"]) == 2
    assert "do not belong together" in " ".join(capsys.readouterr().out.split())


@pytest.mark.long
def test_autotune_measures_bert_base_if_it_is_asked_to(capsys: pytest.CaptureFixture[str]) -> None:
    program = load("benchmarks/autotune.py")
    assert "bert_base" not in {cell.model for cell in program.choose(program.parse([]))}
    flags = ["--models", "bert_base", "--scale", "test", "--rounds", "3", "--backend", "ltc"]
    program.main(flags)
    found = capsys.readouterr().out
    assert "bert_base: ltc " in found


def test_autotune_has_to_keep_up_with_the_best() -> None:
    program = load("benchmarks/autotune.py")
    rows = [Row("eager", "ok", ms=2.0, ratio=1.0), Row("onnxrt", "ok", ms=1.0, ratio=2.0)]
    rows += [Row("ov", "wrong", ms=None, ratio=None)]
    assert program.best_single(rows) == ("onnxrt", 2.0)
    assert program.passed([*rows, Row("autotune", "ok", ratio=1.95)])
    assert not program.passed([*rows, Row("autotune", "ok", ratio=1.9)])
    assert not program.passed([*rows, Row("autotune", "wrong")])
    slow = [rows[0], Row("onnxrt", "ok", ratio=0.5)]
    assert program.best_single(slow) == ("eager", 1.0)
    assert not program.passed([*slow, Row("autotune", "ok", ratio=0.975)])

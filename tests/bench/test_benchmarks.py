"""The benchmark programs load and read their command lines; running them is no test's business."""

import pytest

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
    "autotune",
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

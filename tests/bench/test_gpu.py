"""The comparison on GPUs: what it asks `dynamo-backends bench` for, and its targets."""

from pathlib import Path

import pytest
import torch

from dynamo_backends.bench import saved_run
from dynamo_backends.bench.cells import Cell, Outcome, Run, Speedup
from tests.bench.made_up import CONTEXT
from tests.bench.programs import load

gpu = load("benchmarks/gpu.py")


def outcome(eager_ms: float, ratio: float) -> Outcome:
    eager = eager_ms / 1e3
    return Outcome(
        "pass", eager_s=(eager,), backend_s=(eager / ratio,), speedup=Speedup(ratio, ratio, ratio)
    )


def run_of(small: dict[str, float], large: dict[str, float] | None = None) -> Run:
    """Two models at batch 1 and 32, with these ratios; eager takes 1 and 1.5 ms."""
    outcomes = {
        Cell(model, backend, batch=batch): outcome(ms, ratio)
        for batch, ratios, ms in ((1, small, 1.0), (32, large or small, 1.5))
        for model in ("dense", "conv")
        for backend, ratio in ratios.items()
    }
    return Run(dict(CONTEXT), [*outcomes], outcomes)


def verdicts(run: Run, expected: int = 2) -> list[bool | None]:
    return [aim.met for aim in gpu.targets(run, expected)]


def test_targets():
    reached = {"openxla": 1.3, "autotune": 2.45, "cudagraphs": 2.5}
    assert verdicts(run_of(reached)) == [True] * 3
    assert verdicts(run_of({**reached, "openxla": 1.2, "autotune": 2.3})) == [False, False, True]
    slow = {"openxla": 1.3, "autotune": 1.3, "cudagraphs": 1.1}
    assert verdicts(run_of(slow)) == [True, True, False]
    assert verdicts(run_of(slow), 3) == [None] * 3, "a model is missing"
    assert verdicts(run_of({})) == [None] * 3
    assert verdicts(run_of({"inductor": 1.5})) == [None] * 3


def test_a_model_that_a_backend_cannot_run_counts_as_eager():
    run = run_of({"openxla": 4.0, "autotune": 4.0})
    run.outcomes[Cell("dense", "openxla", batch=1)] = Outcome("fail_accuracy", reason="differs")
    run.outcomes[Cell("conv", "autotune", batch=1)] = Outcome("timeout")
    mean, share, _ = gpu.targets(run, 2)
    assert mean.found == f"{4**0.75:.2f} over 4 cells"
    assert not share.met
    assert share.found == ("3 of 4 cells; the worst is 0.00, conv in inference, float32, batch 1")


def test_only_models_that_launching_bounds_need_cuda_graphs():
    run = run_of({"cudagraphs": 1.1})
    for cell in run.cells:
        if cell.batch == 32:
            run.outcomes[cell] = outcome(4.0, 1.1)
    assert gpu.targets(run, 2)[2].found == "no model is overhead-bound"


def test_options_are_those_of_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    asked: list[list[str]] = []
    monkeypatch.setattr(gpu, "command", lambda words: asked.append(words) or 0)
    monkeypatch.setitem(gpu.BACKENDS, "cpu", ("inductor", "cudagraphs", "ltc", "no_such"))
    assert gpu.main(["--device", "cpu", "--batch", "2", "--output", str(tmp_path / "x.json")]) == 0
    (words,) = asked
    assert words[:2] == ["bench", "gpu"]
    assert words[words.index("--backends") :][:3] == ["--backends", "inductor", "ltc"]
    assert words[-6:-2] == ["--device", "cpu", "--batch", "2"], (
        "after the defaults, which it overrides"
    )
    said = " ".join(capsys.readouterr().out.split())
    assert "without no_such: this version does not have it" in said
    assert "without cudagraphs: it is not for cpu" in said
    assert "target:" not in said, "they are for GPUs"


@pytest.mark.parametrize(("ratio", "status"), [(1.3, 0), (1.2, 1)])
def test_a_missed_target_is_the_exit_status(
    ratio: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "results.json"
    outcomes = {
        Cell(case.name, "openxla", batch=32): outcome(1.0, ratio) for case in gpu.gpu("test")
    }
    saved_run.save(Run(dict(CONTEXT), [*outcomes], outcomes), file)
    monkeypatch.setattr(gpu, "command", lambda words: 0)
    assert gpu.main(["--backends", "openxla", "--output", str(file)]) == status


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_cuda_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert gpu.main(["--backends", "openxla", "--output", str(tmp_path / "x.json")]) == 2
    assert "--device cuda needs a GPU" in " ".join(capsys.readouterr().err.split())


def test_the_suite_is_one_of_bench(tmp_path: Path):
    from dynamo_backends.bench.cells import BenchConfig
    from dynamo_backends.bench.sources import cases

    names = [case.name for case in cases(BenchConfig("gpu", scale="test"), 2)]
    assert names[-1] == "gpt2"
    assert len(names) == 11

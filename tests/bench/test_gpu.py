"""The comparison on GPUs, run on the CPU with small models: results, resuming, targets."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dynamo_backends.bench.results_files import ResultError
from dynamo_backends.bench.suites import ModelCase
from dynamo_backends.bench.suites.catalogue import SUITES
from harness import cell_runs, cell_tables
from harness.cells import Cell, Measuring, Row, cells, measure_cell
from harness.ledger import Ledger
from tests.bench.programs import load

gpu = load("benchmarks/gpu.py")
CONTEXT = {"device": "a GPU", "driver": "1.2", "cuda": "13.0", "versions": {"torch": "2.13.0"},
           "python": "3.11", "scale": "bench", "rounds": 20, "date": "2026-11-21"}  # fmt: skip


def wrong(captured: Any, inputs: Any) -> Callable[..., Any]:
    return lambda *args: [x * 1.05 for x in captured(*args)]


def broken(captured: Any, inputs: Any) -> Callable[..., Any]:
    raise RuntimeError("no licence")


def in_bfloat16(captured: Any, inputs: Any) -> Callable[..., Any]:
    def run(*args: Any) -> list[Any]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return [x.float() for x in captured(*args)]

    return run


wrong._tags = broken._tags = in_bfloat16._tags = ()  # type: ignore[attr-defined]


def tiny(scale: str, batch: int) -> list[ModelCase]:
    def dense() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 3))

    def conv() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())

    return [
        ModelCase("dense", dense, lambda: (torch.randn(batch, 6),)),
        ModelCase("conv", conv, lambda: (torch.randn(batch, 2, 6, 6),)),
    ]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.backends import registry

    monkeypatch.setitem(SUITES, "tiny", tiny)
    monkeypatch.setattr(gpu, "MODELS", (("tiny", "dense"), ("tiny", "conv")))
    functions = {"wrong": wrong, "broken": broken, "in_bfloat16": in_bfloat16}
    for name, function in functions.items():
        name = f"gpu_test_{name}"
        monkeypatch.setitem(registry._COMPILER_FNS, name, function)
        monkeypatch.setitem(registry._BACKENDS, name, None)


def run(folder: Path, *more: str) -> tuple[int, dict[str, Any]]:
    file = folder / "results.json"
    status = gpu.main(
        ["--device", "cpu", "--scale", "test", "--rounds", "2", "--batch", "2", "--json", str(file),
         *more]
    )  # fmt: skip
    return status, json.loads(file.read_text())


def rows_of(content: dict[str, Any]) -> dict[tuple[str, str, str], dict[str, Any]]:
    return {
        (x["cell"]["model"], x["cell"]["mode"], r["backend"]): r
        for x in content["results"]
        for r in x["rows"]
    }


def test_every_backend_is_checked_and_timed_or_says_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    names = ["aot_eager", "gpu_test_wrong", "gpu_test_broken", "tensorrt", "no_such"]
    flags = [x for name in names for x in ("--backend", name)]
    status, content = run(tmp_path, "--dtype", "float32", *flags)
    assert status == 1
    rows = rows_of(content)
    assert len(content["results"]) == 4
    for model in ("dense", "conv"):
        for mode in ("inference", "training"):
            good = rows[model, mode, "aot_eager"]
            assert (good["status"], good["error"]) == ("ok", "")
            assert good["ms"] > 0
            assert good["ratio_95"][0] <= good["ratio"] <= good["ratio_95"][1]
            bad = rows[model, mode, "gpu_test_wrong"]
            assert bad["status"] == "wrong"
            assert "differs from eager by up to" in bad["error"]
            assert bad["ms"] is None
            failed = rows[model, mode, "gpu_test_broken"]
            assert (failed["status"], failed["error"]) == ("failed", "RuntimeError: no licence")
    said = " ".join(capsys.readouterr().out.split())
    assert "without no_such: this version does not have it" in said
    assert "target:" not in said, "they are for GPUs"
    page = (tmp_path / "results.md").read_text()
    assert "## training, float32, batch 2" in page
    assert "| dense |" in page
    assert "gpu_test_broken: failed: RuntimeError: no licence" in page


def test_bfloat16_and_a_backend_of_this_package(tmp_path: Path):
    flags = ["--dtype", "bf16", "--mode", "inference", "--models", "dense"]
    status, content = run(tmp_path, *flags, "--backend", "ltc")
    (result,) = content["results"]
    assert status == 0
    assert [r["status"] for r in result["rows"]] == ["ok", "ok"]
    assert result["cell"]["dtype"] == "bf16"


@pytest.mark.long
def test_a_run_out_of_time_is_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    flags = ["--dtype", "float32", "--backend", "aot_eager"]
    _, first = run(tmp_path, *flags, "--budget", "0.001")
    assert len(first["results"]) == 1
    assert "3 cells are left; the same command goes on with them" in capsys.readouterr().out
    _, second = run(tmp_path, *flags)
    assert len(second["results"]) == 4
    assert second["results"][0] == first["results"][0]
    assert second["running"] is None
    before = (tmp_path / "results.json").stat().st_mtime_ns
    run(tmp_path, *flags)
    assert (tmp_path / "results.json").stat().st_mtime_ns == before, "nothing is left to measure"


def test_an_interrupted_run_blames_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(
        cell_runs, "measure_cell", lambda c, b, h, step: step("aot_eager") or stop()
    )
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "--backend", "aot_eager")
    content = json.loads((tmp_path / "results.json").read_text())
    assert (content["running"], content["died"]) == (None, [])


def test_parts_are_all_cells_once():
    whole = gpu.choose(gpu.parse([]))
    assert len(whole) == len(set(whole)) == 2 * 2 * 2 * 2
    parts = [gpu.choose(gpu.parse(["--part", f"{k}/3"])) for k in (1, 2, 3)]
    assert sorted(c for p in parts for c in p) == sorted(whole)


@pytest.mark.parametrize("text", ["0/3", "4/3", "2", "a/b", "1/-2"])
def test_wrong_parts(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    json_file = str(tmp_path / "x.json")
    assert gpu.main(["--device", "cpu", "--part", text, "--json", json_file]) == 2
    assert "--part must be like 2/4" in capsys.readouterr().out


def test_an_unknown_model(capsys: pytest.CaptureFixture[str]):
    assert gpu.main(["--device", "cpu", "--models", "danse"]) == 2
    assert "unknown model 'danse'; there are: dense, conv" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_cuda_it_says_so(capsys: pytest.CaptureFixture[str]):
    assert gpu.main([]) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "torch sees no CUDA device here." in said
    assert "--device cpu runs this program on the CPU" in said


CELL = Cell("inference", "float32", 1, "tiny", "dense")


def test_a_backend_that_kills_the_process_twice_counts_as_failed(tmp_path: Path):
    file = tmp_path / "results.json"
    for deaths in range(3):
        ledger = Ledger(file, CONTEXT)
        assert ledger.deadly(CELL) == (["bad"] if deaths == 2 else [])
        if deaths < 2:
            ledger.begin(CELL, "bad")  # and the process dies
    ledger.finish(CELL, [Row("eager", "ok", ms=1.0, ratio=1.0)], 3.0)
    found = Ledger(file, CONTEXT).results[CELL]
    assert [(r.backend, r.status) for r in found] == [("eager", "ok"), ("bad", "failed")]
    assert "the process died" in found[1].error


def test_results_of_another_machine_are_not_mixed(tmp_path: Path):
    file = tmp_path / "results.json"
    Ledger(file, CONTEXT).finish(CELL, [], 1.0)
    later = Ledger(file, {**CONTEXT, "date": "2026-12-01"})
    assert later.context["date"] == "2026-11-21"
    with pytest.raises(ResultError, match="device is 'another' and was 'a GPU'"):
        Ledger(file, {**CONTEXT, "device": "another"})
    file.write_text("{}")
    with pytest.raises(ResultError, match="is no result of `cells`"):
        Ledger(file, CONTEXT)


def table(small: dict[str, float], large: dict[str, float] | None = None) -> dict[Cell, list[Row]]:
    """Two models at batch 1 and 32, with these ratios; eager takes 1 and 1.5 ms."""
    results = {}
    for batch, ratios, ms in ((1, small, 1.0), (32, large or small, 1.5)):
        for model in ("dense", "conv"):
            cell = Cell("inference", "float32", batch, "tiny", model)
            rows = [Row(n, "ok", ms=ms / r, ratio=r) for n, r in ratios.items()]
            results[cell] = [Row("eager", "ok", ms=ms, ratio=1.0), *rows]
    return results


def verdicts(results: Any, expected: int = 2) -> list[bool | None]:
    return [t.met for t in cell_tables.targets(results, expected)]


def test_targets():
    assert verdicts(table({"openxla": 1.3, "autotune": 2.45, "cudagraphs": 2.5})) == [True] * 3
    assert verdicts(table({"openxla": 1.2, "autotune": 2.3, "cudagraphs": 2.5})) == [
        False, False, True]  # fmt: skip
    assert verdicts(table({"openxla": 1.3, "autotune": 1.3, "cudagraphs": 1.1})) == [
        True, True, False]  # fmt: skip
    assert verdicts(table({"openxla": 1.3, "autotune": 1.3, "cudagraphs": 1.1}), 3) == [None] * 3
    assert verdicts({}) == [None] * 3
    assert verdicts(table({"inductor": 1.5})) == [None] * 3


def test_a_model_that_a_backend_cannot_run_counts_as_eager():
    results = table({"openxla": 4.0})
    cell = next(iter(results))
    results[cell][1] = Row("openxla", "wrong", error="output 0 differs")
    assert cell_tables.mean_ratio(results.values(), "openxla") == pytest.approx(4**0.75)
    aims = cell_tables.targets(results, 2)
    text = cell_tables.markdown(results, CONTEXT, aims, "python benchmarks/gpu.py")
    assert "| dense | 1.00 | wrong | eager |" in text
    assert "- autotune within 3% of the best candidate on every model: open" in text
    assert "a GPU, driver 1.2, CUDA 13.0; torch 2.13.0; Python 3.11. Measured 2026-11-21" in text
    assert "- dense, inference, float32, batch 1, openxla: wrong: output 0 differs" in text


def test_cells_of_inference_come_first():
    modes = ["inference", "training"]
    order = list(cells([("tiny", "dense")], [1, 32], ["float32", "bf16"], modes))
    found = [(c.mode, c.dtype, c.batch) for c in order[:5]]
    assert found[:2] == [("inference", "float32", 1), ("inference", "float32", 32)]
    assert found[2::2] == [("inference", "bf16", 1), ("training", "float32", 1)]
    assert len(order) == 8


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_is_right_only_where_eager_may_compute_so(autocast: bool):
    how = Measuring("cpu", "test", 2, autocast=autocast)
    backends = ["gpu_test_in_bfloat16", "gpu_test_wrong", "aot_eager"]
    rows = {row.backend: row for row in measure_cell(CELL, backends, how)}
    status = {name: row.status for name, row in rows.items()}
    assert status["gpu_test_in_bfloat16"] == ("ok" if autocast else "wrong")
    assert status["gpu_test_wrong"] == "wrong"
    assert status["aot_eager"] == "ok"
    error = rows["gpu_test_in_bfloat16"].max_rel
    assert error is not None
    assert error > 1e-4, "of float32, not of autocast"

"""What the benchmark programs write into pages, from results that nobody measured."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from dynamo_backends.bench import saved_run
from tests.bench.made_up import passing, run_of
from tests.bench.programs import load

MIB = 2**20
SETTINGS = {"batch": 4, "model": "resnet50", "backend": "onnxrt", "sizes": 0, "cpu": False}
SETTINGS |= {"layers": 100, "calls": 1000, "exact": False, "python": ["replay", "frozen"]}


def run(peak: int) -> dict[str, int]:
    """What a process of memory.py hands back."""
    return {"peak": peak, "private": peak // 2, "end": peak, "weights": 10_000_000}


RESULTS: dict[str, tuple[Any, list[str]]] = {
    "memory": (
        [{"eager": [run(100_000_000)], "started": [run(120_000_000)],
          "compiled": [run(130_000_000)]}],
        ["eager", "100", "0", "0.00", "50", "0.00", "100"],
    ),
    "cold_compilation": (
        [{"backend": "ov", "graphs": [{"cpu_s": 2.0, "trials": 3}, {"cpu_s": 1.0, "trials": 0}]}],
        ["ov", "2.0 (3)", "1.0 (0)", "3.0 (3)"],
    ),
    "package_start": (
        [{"model": "resnet50", "backend": "ov", "mib": 98.0, "starts": [
            {"imports": 1.0, "load": 0.1, "first": 0.2, "processor": 0.4, "dynamo": False}]}],
        ["resnet50", "ov", "1.00", "0.10", "0.20", "0.40", "no", "98"],
    ),
    "call_overhead": (
        [{"mode": "no_grad", "eager_us": 9.0, "compiled_us": 8.0, "graph_us": 7.0, "alone_us": 6.0,
          "overhead_us": 1.0, "guards_us": 1.0, "growth_kb": 0.0}],
        ["no_grad", "9.0", "8.0", "7.0", "6.0", "1.0", "1.0", "+0 KiB"],
    ),
    "freezing_check": (
        [{"check": "probe", "time_us": 50.0, "cpu_us": 40.0}],
        ["probe", "50.0", "40.0"],
    ),
    "cache_start": (
        [{start: [{"first_call_s": s, "backend_s": 1.0, "cache_hits": 1, "executables": 1}]
          for start, s in (("cold", 4.0), ("warm", 2.0))}],
        ["cold", "4.00", "1.00", "1 of 1"],
    ),
    "training_memory": (
        [{"lstm": {column: {"step": 2.0 * MIB, "process": 400.0 * MIB}
                   for column in ("eager", "compile_step inductor", "compile_step openxla")}}],
        ["lstm", "2", "400", "2", "400", "2", "400"],
    ),
    "collectives": (
        [{"devices": 8, "rows": 256, "parallel": "ddp", "exchanged": {"all-reduce": 1.0},
          "held": 3.0}],
        ["8", "256", "ddp", "all-reduce 1.00", "3.00"],
    ),
    "background": (
        {"classic/bert/background": {
            "alone_ms": [1.0, 2.0], "during_ms": [1.0, 2.0, 3.0, 4.0], "calls": 50, "limit_ms": 7.2,
            "over": 1, "tuned_s": 60.0, "speedup": 1.5, "chosen": ["ov"]}},
        ["bert", "1.0, 2.0", "1.0, 2.0, 3.0, 4.0", "50", "7.2", "1", "60", "-", "1.50", "-", "ov",
         "-"],
    ),
    "tuning_time": (
        {"classic/bert/20": {"speedup": 1.5, "first_call_s": 21.0, "chosen": ["ov"]},
         "classic/bert/600": {"speedup": 2.0, "first_call_s": 80.0, "chosen": ["onnxrt"]}},
        ["bert", "1.50 (21)", "2.00 (80)", "onnxrt"],
    ),
    "while_compiling": (
        [{"backend": "ov", "pause_ms": 20.0, "alone_ms": [10.0, 20.0],
          "during_ms": [15.0, 20.0, 90.0], "calls": 30, "over": 2, "alone_calls": 40,
          "alone_over": 1, "served_s": [2.0]}],
        ["ov", "20", "10.0, 20.0", "15.0, 20.0, 90.0", "30", "1.50", "1.00", "2", "1 of 40", "2.0"],
    ),
    "device_steps": (
        [{"ms": {"jax.jit by hand": 140.0, "compile_step on the double": 150.0}, "ratio": 0.93,
          "ratio_95": [0.9, 0.96]}],
        ["jax.jit by hand", "140.00"],
    ),
    "traffic": (
        [{"stream": "images", "summary": "of a camera", "column": column, "cold_s": cold,
          "slowest_s": 2.0, "executables": made, "p50_ms": 1.0, "p95_ms": 2.0, "p99_ms": 3.0,
          "times_eager": 1.5, "eager_p95_ms": 4.0, "times_exact": None, "growth": MIB, "wrong": 0}
         for column, cold, made in (("ov", 5.0, 3), ("inductor", 10.0, None))],
        ["ov", "5.0", "2.00", "0.50", "3", "1.0", "2.0", "3.0", "1.50", "4.0", "1", "0"],
    ),
    "step_overhead": (
        [{"step": "mlp-sgd", "calls": 20, "replay": 75.0, "frozen": 20.4}],
        ["mlp-sgd", "20", "75", "20"],
    ),
    "serving": (
        [{"way": way, "answers": 100, "failed": 0, "compilations": 0.0, "requests_a_second": speed,
          "latency_ms": {"50": 8.0, "95": 10.0 / speed, "99": 12.0}, "processor_s": 2.0}
         for way, speed in (("compiled", 10.0), ("eager", 5.0))],
        ["compiled", "10.0", "8.0", "1.0", "12.0", "20.0", "0", "0"],
    ),
}  # fmt: skip
"""Records of a program, and the first row of its table."""

SENTENCES = {
    "serving": "compiled: 2.00 times the throughput, 0.50 times the p95 latency",
    "traffic": "images: of a camera",
    "cache_start": "a warm start is 2.00 × as fast as a cold one",
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_program_shows_what_it_has_saved(name: str) -> None:
    records, first = RESULTS[name]
    content = {"results": json.loads(json.dumps(records)), "settings": SETTINGS}
    table, *sentences = load(f"benchmarks/{name}.py").published(content)
    assert isinstance(table, Table)
    row = [next(iter(column.cells)) for column in table.columns]
    assert [cell for cell in row if cell] == first
    assert sentences == ([SENTENCES[name]] if name in SENTENCES else [])


def test_shares_of_first_calls_are_shown() -> None:
    processes = {"first_call_s": 4.0, "verify_s": 1.0, "growth": 2 * MIB}
    row = {"model": "bert", "first": processes, "off": {**processes, "growth": MIB}}
    table, said = load("benchmarks/compile_time.py").published(
        {"kind": "comparison", "results": [row]}
    )
    cells = [next(iter(column.cells)) for column in table.columns]
    assert cells == ["bert", "4.00", "1.000", "25.0%", "2", "1", "2.00"]
    assert said == "the largest share is 25.0%, the mean 25.0%"


def test_sizes_are_shown_beside_one_size() -> None:
    medians = {key: [2e6, 3e6] for key in ("peak", "private", "end")}
    rows = [{"backend": "ov", **medians, "ratios": dict.fromkeys(medians, 1.5)}]
    content = {"results": rows, "settings": {**SETTINGS, "sizes": 20}}
    (table,) = load("benchmarks/memory.py").published(content)
    row = [next(iter(column.cells)) for column in table.columns]
    assert row == ["ov", "2", "3", "1.50", "1.50", "1.50"]


def test_processes_are_shown_with_their_cores() -> None:
    program = load("benchmarks/scaling.py")
    row = {kind: dict.fromkeys(program.WAYS, 2.0) for kind in (
        "milliseconds", "in the program", "in the kernel", "page faults")}  # fmt: skip
    content = {"results": [{"model": "bert", **row}], "settings": {"processes": 2}}
    steps, cores = program.published(content)
    assert [next(iter(column.cells)) for column in steps.columns][-4:] == [
        "2.00", "1.00", "2.00", "1.00",
    ]  # fmt: skip
    assert [list(column.cells) for column in cores.columns][1] == [
        "in the program", "in the kernel", "page faults",
    ]  # fmt: skip


def test_imports_are_shown_in_a_sentence() -> None:
    said = load("benchmarks/import_time.py").published({"results": [1.0, 3.0, 2.0]})
    assert said == ["import torch + 2.00 ms (median of 3, 1.00 to 3.00)"]


def test_autotune_is_shown_beside_its_candidates(tmp_path: Path) -> None:
    run = run_of(
        {
            ("bert", "inductor_freezing"): passing(2.0, noise=0),
            ("bert", "autotune"): replace(passing(2.5, noise=0, chosen=("ov",)), max_rel=1e-6),
        }
    )
    run.context |= {"backends": ["inductor_freezing"], "precision": "float32"}
    saved_run.save(run, tmp_path / "run.json")
    content = json.loads((tmp_path / "run.json").read_text())
    (table,) = load("benchmarks/autotune.py").published(content)
    heads = [str(column.header) for column in table.columns]
    assert heads[:4] == ["model", "eager ms", "inductor_freezing", "autotune"]
    first = [next(iter(column.cells)) for column in table.columns]
    chosen = "ov; 1 operators in eager"
    assert first == ["bert", "10.0", "[bold]2.00[/]", "2.50", chosen, "1.25", "1e-06"]


def test_where_results_are_kept_is_not_among_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, file = load("benchmarks/freezing_check.py"), tmp_path / "check.json"
    flags = ["--parameters", "4", "--width", "2", "--repeat", "1", "--rounds", "2"]
    monkeypatch.setattr("sys.argv", ["benchmarks/freezing_check.py", *flags, "--json", str(file)])
    assert program.main([*flags, "--json", str(file)]) == 0
    assert str(tmp_path) not in file.read_text()
    content = json.loads(file.read_text())
    assert content["command"] == f"python benchmarks/freezing_check.py {' '.join(flags)}"
    (table,) = program.published(content)
    assert [str(c) for c in table.columns[0].cells][1:] == ["probe", "strict"]


def test_a_server_that_ends_says_why() -> None:
    program = load("benchmarks/serving.py")
    command = [sys.executable, "-c", "import sys; sys.exit('there is no such package')"]
    with (
        pytest.raises(
            program.harness.ChildError, match="does not answer: there is no such package"
        ),
        program.served(command),
    ):
        pytest.fail("it never answered")

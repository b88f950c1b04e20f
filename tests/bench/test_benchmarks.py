"""The benchmark programs load and read their command lines; running them is no test's business."""

from pathlib import Path
from typing import Any

import pytest
import torch

import harness
from dynamo_backends.bench.cells import Cell, Outcome
from dynamo_backends.bench.suites.case import ModelCase
from harness import captures
from tests.bench.made_up import failing, passing
from tests.bench.programs import ROOT, load

PROGRAMS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "networks"])
def test_program_says_what_it_does_and_how_to_run_it(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program = load(f"benchmarks/{name}.py")
    if name == "gpu":  # which takes the options of `dynamo-backends bench`
        assert "python benchmarks/gpu.py" in program.__doc__
        return
    with pytest.raises(SystemExit) as ended:
        program.main(["--help"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert " ".join(program.__doc__.splitlines()[0].split()) in shown
    assert f"python benchmarks/{name}.py" in program.__doc__


def test_unknown_model_gets_help_and_exit_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert load("benchmarks/autotune.py").main(["--models", "resnet8"]) == 2
    assert "Did you mean 'resnet18'?" in capsys.readouterr().out


def test_what_a_call_multiplies_is_counted() -> None:
    left, right = torch.randn(10, 20), torch.randn(20, 30)
    products = harness.products_of(lambda: (left @ right).exp())
    assert products.gflop == pytest.approx(2 * 10 * 20 * 30 / 1e9)
    assert products.peak > 0


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("kind", [torch.nn.Conv2d, torch.nn.ConvTranspose2d])
def test_gradients_of_convolutions_multiply_as_much_as_these(groups: int, kind: Any) -> None:
    layer = kind(8, 12, 3, stride=2, groups=groups)
    image = torch.randn(2, 8, 16, 16, requires_grad=True)
    forward = harness.products_of(lambda: layer(image)).gflop
    assert forward > 0
    whole = harness.products_of(lambda: layer(image).sum().backward()).gflop
    assert whole == pytest.approx(3 * forward)


def test_budgets_are_measured_one_by_one_and_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, measured = load("benchmarks/tuning_time.py"), []

    def in_a_process(name: str, _: Any) -> dict[str, Any]:
        measured.append(name)
        if name.endswith("/5"):
            raise harness.ChildError("planted")
        return {"speedup": 2.0, "speedup_95": [1.9, 2.1], "first_call_s": 7, "chosen": ["ov"]}

    monkeypatch.setattr(program, "in_a_process", in_a_process)
    monkeypatch.setattr(program, "SUITES", ("classic",))
    file = str(tmp_path / "times.json")
    flags = ["--scale", "test", "--models", "squeezenet1_1", "--json", file]
    program.main([*flags, "--budgets", "20", "600", "--minutes", "0"])
    assert "2 are left; the same command goes on" in capsys.readouterr().out
    assert program.main([*flags, "--budgets", "20"]) == 0
    assert program.main([*flags, "--budgets", "20", "600"]) == 0
    assert "2.00 (7)" in capsys.readouterr().out
    assert measured == ["classic/squeezenet1_1/20", "classic/squeezenet1_1/600"]
    assert program.main([*flags, "--budgets", "5"]) == 1
    assert "classic/squeezenet1_1/5: planted" in capsys.readouterr().out
    assert program.main([*flags, "--batch", "2"]) == 2
    assert "were measured under other conditions" in " ".join(capsys.readouterr().out.split())


def test_compilations_are_measured_one_by_one_and_judged_by_their_means(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, measured = load("benchmarks/compile_time.py"), []
    seconds = {"inductor": 10, "inductor_freezing": 5, "openxla": 2, "onnxrt": 5, "ov": 3}

    def in_processes(name: str, batch: int) -> dict[str, Any]:
        measured.append(name)
        if name == "vgg16/ov" and measured.count(name) < 3:
            raise harness.ChildError("planted")
        cold = seconds.get(name.partition("/")[2], 2)
        return {"cold": {"s": cold}, "second": {"s": 0.5 * cold}, "verdicts": {"s": 0.9 * cold}}

    monkeypatch.setattr(program.compilations, "in_processes", in_processes)
    flags = ["--table", "--json", str(tmp_path / "table.json"), "--models", "vgg16", "swin_t"]
    assert program.main([*flags, "--minutes", "0"]) == 0
    assert "14 are left; the same command goes on" in capsys.readouterr().out
    assert program.main(flags) == 1
    out = capsys.readouterr().out
    assert "vgg16/ov: planted" in out
    assert "onnxrt takes 2.50 times as long as exporting and loading by hand (at most 1.5" in out
    assert "ov takes 1.50 times as long as exporting" in out, "of one model"
    row = {"cold": {"s": 5.0}, "second": {"s": 2.5}, "verdicts": {"s": 4.5}}
    assert program.compilations._cell(row) == "5.0 / 4.5 / 2.5"
    assert len(measured) == 14
    program.main(flags)
    assert "vgg16/ov: planted" in capsys.readouterr().out
    program.main(flags)
    assert "planted" not in capsys.readouterr().out
    assert measured[14:] == ["vgg16/ov", "vgg16/ov"], "what failed is tried again"
    seconds["openxla"] = 4
    assert program.main(["--table", "--models", "alexnet"]) == 1
    assert "openxla takes 0.40 times as long as inductor" in capsys.readouterr().out
    assert program.main(["--table", "--models", "resnet8"]) == 2


def test_the_parts_of_a_first_compiled_step_are_timed() -> None:
    with pytest.MonkeyPatch.context() as patches:
        for name in captures.TIMED:  # which are restored afterwards
            patches.setattr(captures.record_program, name, getattr(captures.record_program, name))
        found = captures.measured(6, "aot_eager")
    assert list(found) == list(captures.PHASES)
    assert all(seconds > 0 for seconds in found.values())
    rows = [{"parameters": 200, "backend": "x", **dict.fromkeys(captures.PHASES, 3.0)}]
    assert captures.problems(rows) == [
        "x: the capture of 200 parameters takes 9.0 CPU s, more than 6"
    ]


def test_training_goes_on_where_it_was_stopped_and_says_what_is_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, measured = load("benchmarks/training.py"), []
    speedups = {"lstm": 0.9, "gpt2": 1.6, "bert": 1.6, "resnet18": 1.6}

    def measure(name: str, settings: Any) -> Any:
        measured.append(name)
        row = program.Row(name)
        for column in map(str, program.columns_of(settings.backends)):
            fast = {"eager": 1.0, "compile_step openxla": speedups[name]}.get(column, 0.8)
            row.milliseconds[column] = 10 / fast
            row.speedups[column] = [fast, fast - 0.1, fast + 0.1]
            row.losses[column] = 1.0
        return row

    monkeypatch.setattr(program, "measure", measure)
    flags = ["--json", str(tmp_path / "training.json"), "--models"]
    assert program.main([*flags, "gpt2", "bert"]) == 0
    assert "1.60 [1.50, 1.70]" in " ".join(capsys.readouterr().out.split())
    assert program.main([*flags, "gpt2", "lstm"]) == 1
    out = capsys.readouterr().out
    assert "lstm: the better compile_step is 0.90 times as fast as eager (1)" in out
    assert "the geometric mean is 1.20 (1.5)" in out
    assert measured == ["gpt2", "bert", "lstm"]
    assert program.main(["--rounds", "3", *flags, "gpt2"]) == 2
    assert "were measured under other conditions" in " ".join(capsys.readouterr().out.split())


def test_tuning_time_says_which_target_is_missed() -> None:
    program = load("benchmarks/tuning_time.py")

    def row(speedup: float) -> dict[str, Any]:
        return {"speedup": speedup, "speedup_95": [speedup] * 2, "first_call_s": 1, "chosen": []}

    models, budgets = ["classic/a", "classic/b"], [20.0, 600.0]
    met = {f"classic/{m}/{b}": row(s) for m in "ab" for b, s in (("20", 1.9), ("600", 2.0))}
    assert program.problems(models, budgets, met) == []
    slow = met | {"classic/a/20": row(1.0), "classic/b/20": row(0.9)}
    found = program.problems(models, budgets, slow)
    assert "classic/b/20: 0.90 times as fast as eager" in found
    assert any("20 s find 47% of the speed of 600 s" in text for text in found)
    wrong = {"classic/a/20": {"error": "its results are wrong"}}
    assert program.problems(models, budgets, wrong) == ["classic/a/20: its results are wrong"]


def test_tuning_beside_calls_says_which_target_is_missed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = load("benchmarks/background.py")
    good = {
        "alone_ms": [10.0, 12.0], "during_ms": [11.0, 18.0, 19.0, 40.0], "calls": 9, "over": 1,
        "limit_ms": 18.2, "tuned_s": 30.0, "speedup": 2.0, "speedup_95": [1.9, 2.1],
        "chosen": ["ov"], "error": "",
    }  # fmt: skip
    results = {f"classic/resnet18/{mode}": good for mode in program.MODES}

    def problems(mode: str, **fields: Any) -> list[str]:
        name = f"classic/resnet18/{mode}"
        found: list[str] = program.problems("classic/resnet18", results | {name: good | fields})
        return found

    assert problems("wait") == []
    (slow,) = problems("background", during_ms=[11.0, 18.3, 19.0, 40.0])
    assert slow.endswith("95% of the calls during tuning take up to 18.3 ms, not 18.2")
    (late,) = problems("background", tuned_s=46.0)
    assert late.endswith("serves after 1.53 times the seconds of 'wait'")
    (lost,) = problems("background", speedup=1.7, speedup_95=[1.6, 1.75])
    assert lost.endswith("1.70 times as fast as eager, after 'wait' 2.00")
    (wrong,) = problems("wait", error="its results are wrong")
    assert wrong == "classic/resnet18/wait: its results are wrong"
    monkeypatch.setattr(program, "in_a_process", lambda name, _: results[name])
    assert program.main(["--scale", "test", "--models", "resnet18"]) == 0
    assert "11.0, 18.0" in " ".join(capsys.readouterr().out.split())


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
    assert "were measured under other conditions" in " ".join(capsys.readouterr().out.split())


@pytest.mark.long
def test_autotune_measures_bert_base_if_it_is_asked_to(capsys: pytest.CaptureFixture[str]) -> None:
    program = load("benchmarks/autotune.py")
    assert "bert_base" not in {case.name for case in program.choose(program.parse([]))}
    flags = ["--models", "bert_base", "--scale", "test", "--rounds", "3", "--backend", "ltc"]
    program.main(flags)
    found = capsys.readouterr().out
    assert "bert_base: ltc " in found


def test_autotune_has_to_keep_up_with_the_best() -> None:
    program = load("benchmarks/autotune.py")

    def tuned(ratio: float) -> dict[str, Outcome]:
        return {"autotune": passing(ratio, noise=0)}

    found = {"onnxrt": passing(2.0, noise=0), "ov": failing("fail_accuracy")}
    assert program.best_single(found) == ("onnxrt", pytest.approx(2.0))
    assert program.passed({**found, **tuned(1.95)})
    assert not program.passed({**found, **tuned(1.9)})
    assert not program.passed({**found, "autotune": failing("fail_accuracy")})
    slow = {"onnxrt": passing(0.5, noise=0)}
    assert program.best_single(slow) == ("eager", 1.0)
    assert not program.passed({**slow, **tuned(0.975)})


def wrong(captured: Any, inputs: Any) -> Any:
    return lambda *args: [x * 1.05 for x in captured(*args)]


def broken(captured: Any, inputs: Any) -> Any:
    raise RuntimeError("no licence")


def in_bfloat16(captured: Any, inputs: Any) -> Any:
    def run(*args: Any) -> list[Any]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return [x.float() for x in captured(*args)]

    return run


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_bfloat16_is_right_only_where_eager_may_compute_so(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.backends import registry

    for function in (wrong, broken, in_bfloat16):
        monkeypatch.setattr(function, "_tags", (), raising=False)
        monkeypatch.setitem(registry._COMPILER_FNS, function.__name__, function)
        monkeypatch.setitem(registry._BACKENDS, function.__name__, None)
    program = load("benchmarks/autotune.py")
    settings = program.parse(["--precision", precision, "--rounds", "2", "--scale", "test"])
    dense = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
    case = ModelCase("dense", lambda: dense, lambda: (torch.randn(2, 6),))
    names = ("wrong", "broken", "in_bfloat16", "aot_eager")
    cells = [Cell("dense", name, batch=2) for name in names]
    found = {cell.backend: o for cell, o in program.measure(case, cells, settings).items()}
    statuses = [found[name].status for name in names]
    inexact = "fail_accuracy" if precision == "float32" else "pass"
    assert statuses == ["fail_accuracy", "fail_to_run", inexact, "pass"]
    assert found["broken"].reason == "RuntimeError: no licence"
    assert found["in_bfloat16"].max_rel > 1e-4, "of float32, not of autocast"
    assert found["aot_eager"].speedup is not None
    assert found["wrong"].speedup is None
    assert found["aot_eager"].graphs == 1, "its own, not those of all backends"

"""Inductor's code in packages: loaded without a compiler, Dynamo and Inductor; the same numbers."""

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends import PackageError, SaveError
from dynamo_backends.cli.main import main
from dynamo_backends.inductor import libraries
from dynamo_backends.package.linked import difference_from_eager
from dynamo_backends.runtime import cpu_info
from tests.bench.programs import ROOT
from tests.package.trained_steps import Training, go_on, simple, update

CHILD = """
import json, os, shutil, sys
assert all(shutil.which(name) is None for name in ("gcc", "cc", "g++", "c++", "clang"))
import torch, dynamo_backends
from safetensors.torch import load_file, save_file

path, *refused = sys.argv[1:]
class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name in refused:
            raise ImportError(f"{name} is imported")

assert not set(refused) & set(sys.modules)
sys.meta_path.insert(0, Refusing())

module = dynamo_backends.load(path, strict=True)
results = [module(x) for x in load_file(path + ".inputs").values()]
save_file({str(i): x for i, x in enumerate(results)}, path + ".results")
counts = dynamo_backends.counters()
print(json.dumps({"counts": counts, "forms": module.forms}))
"""


class Blocks(nn.Module):
    """Two equal blocks with weights of their own, an operator in eager between, and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 32)
        self.first = nn.Linear(32, 32)
        self.second = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(torch.relu(self.first(torch.tanh(self.table(x)))))
        return torch.relu(self.second(y))


IN_EAGER = {"keep_in_eager": ("aten.tanh",), "min_block_size": 1}


def numbers(*shape: int) -> Tensor:
    return torch.arange(int(torch.tensor(shape).prod())).reshape(shape) % 16


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[nn.Module, Path]]:
    """The blocks in a package of a backend; those of a session are saved once."""
    folder, made = tmp_path_factory.mktemp("inductor"), dict[str, tuple[nn.Module, Path]]()

    def package(backend: str) -> tuple[nn.Module, Path]:
        if backend not in made:
            torch.manual_seed(0)
            model, path = Blocks().eval(), folder / f"{backend}.dbp"
            dynamo_backends.save(model, path, (numbers(4, 8),), backend=backend, options=IN_EAGER)
            made[backend] = model, path
        return made[backend]

    return package


STATIC = ("torch._dynamo", "torch._inductor")
RANGED = ()  # the graph is read, by what torch.export reads, and that imports both


def in_a_new_process(
    path: Path, inputs: list[Tensor], folder: Path, refused: Sequence[str] = STATIC
) -> tuple[Any, list[Tensor]]:
    """Loads a package where there is no compiler; returns what it says, and the results.

    Args:
        path: Path of the package.
        inputs: Inputs, one for each call.
        folder: An empty one.
        refused: Modules that cannot be imported.
    """
    save_file({str(i): x for i, x in enumerate(inputs)}, f"{path}.inputs")
    said = run_without_compiler(CHILD, path, folder, refused)
    results = load_file(f"{path}.results")
    return json.loads(said.splitlines()[-1]), [results[str(i)] for i in range(len(inputs))]


def run_without_compiler(code: str, path: Path, folder: Path, more: Sequence[str] = ()) -> str:
    """Runs Python where there is no compiler; returns what it prints."""
    variables = {
        **os.environ, "PATH": str(folder), "DYNAMO_BACKENDS_CACHE": str(folder / "none"),
        "OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    variables.pop("CXX", None)
    ran = subprocess.run(
        [sys.executable, "-c", code, str(path), *more],
        env=variables, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def manifest(path: Path) -> Any:
    with zipfile.ZipFile(path) as file:
        return json.loads(file.read("manifest.json"))


def libraries_in(path: Path) -> int:
    executables = manifest(path)["executables"]
    return sum(name.endswith(".so") for entry in executables for name in entry["parts"])


@pytest.mark.parametrize(("backend", "count"), [("inductor", 2), ("inductor_freezing", 3)])
def test_a_new_process_needs_no_compiler(backend: str, count: int, saved: Any, tmp_path: Path):
    model, path = saved(backend)
    said, (result,) = in_a_new_process(path, [numbers(4, 8)], tmp_path)
    counts = said["counts"]
    assert counts["executables"] == counts["cache_hits"] == 2
    assert not any(counts[k] for k in ("uncompiled", "failed", "wrong", "eager_calls"))
    assert torch.equal(result, dynamo_backends.load(path)(numbers(4, 8)))
    with torch.no_grad():
        torch.testing.assert_close(result, model(numbers(4, 8)))
    assert libraries_in(path) == count, "frozen weights are in a library of their own"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_library_serves_a_range(dtype: torch.dtype, tmp_path: Path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Flatten(0, 1))
    model, path = model.to(dtype).eval(), tmp_path / "m.dbp"
    batch, length = (torch.export.Dim(n, min=2, max=64) for n in ("batch", "length"))
    given = torch.rand(4, 8, 16, dtype=dtype)
    dynamo_backends.save(
        model, path, (given,), dynamic_shapes=({0: batch, 1: length},), backend="inductor_freezing"
    )
    module = dynamo_backends.load(path, strict=True)
    inputs = [torch.rand(*shape, 16, dtype=dtype) for shape in ((2, 2), (4, 8), (7, 3), (64, 33))]
    _, results = in_a_new_process(path, inputs, tmp_path, RANGED)
    for x, result in zip(inputs, results, strict=True):
        assert torch.equal(result, module(x))
        assert difference_from_eager(module, ((x,), {}), module) is None
    (report,) = module.reports
    assert report.executables == report.cache_hits == libraries_in(path) == 1
    assert report.ops_in_eager == 0
    assert not report.events
    with pytest.raises(PackageError, match=r"\[65, 8, 16\], .* 2 to 64"):
        module(torch.rand(65, 8, 16, dtype=dtype))


class Called(nn.Module):
    """Has an operator for which Inductor has no loop, and torch no C function."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.matrix_exp(x) + torch.relu(x)


def test_operators_that_torch_calls_by_name(tmp_path: Path):
    path, x = tmp_path / "m.dbp", torch.rand(4, 4) - 0.5
    dynamo_backends.save(Called().eval(), path, (x,), backend="inductor")
    _, (result,) = in_a_new_process(path, [x], tmp_path)
    torch.testing.assert_close(result, Called()(x))
    (entry,) = manifest(path)["executables"]
    assert sorted(entry["parts"]) == ["0.json", "0.so", "contents"]


@pytest.mark.long
def test_autotune_may_choose_inductor(tmp_path: Path):
    model, path = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).eval(), tmp_path / "m.dbp"
    options = {"candidates": ["inductor"], "budget_s": 60}
    dynamo_backends.save(model, path, (torch.rand(4, 16),), backend="autotune", options=options)
    module = dynamo_backends.load(path, strict=True)
    assert module.backend in ("inductor", "eager")
    assert module.notes == (f"autotune chose {module.backend} when it was saved",)
    assert libraries_in(path) == (module.backend == "inductor")


@pytest.mark.long
def test_convolutions_are_packed_ahead(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    torch.manual_seed(0)
    model, path = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU()), tmp_path / "m"
    x = torch.rand(2, 3, 16, 16)
    dynamo_backends.save(model.eval(), path, (x,), backend="inductor_freezing")
    _, (result,) = in_a_new_process(path, [x], tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(result, model(x))
    assert "own kernels" in manifest(path)["notes"][0]
    assert main(["inspect", str(path)]) == 0
    assert "without this package's own kernels" in capsys.readouterr().out


def test_weights_that_are_not_frozen_are_stored_once(tmp_path: Path):
    path, model = tmp_path / "m.dbp", nn.Sequential(nn.Linear(1024, 1024), nn.ReLU())
    dynamo_backends.save(model.eval(), path, (torch.rand(4, 1024),), backend="inductor")
    assert path.stat().st_size < 1.5 * sum(p.nbytes for p in model.parameters())
    result = dynamo_backends.load(path)(torch.ones(4, 1024))
    with torch.no_grad():
        torch.testing.assert_close(result, model(torch.ones(4, 1024)))


def test_inspect_and_repr_say_what_each_part_is(saved: Any, capsys: pytest.CaptureFixture[str]):
    _, path = saved("inductor_freezing")
    assert main(["inspect", str(path)]) == 0
    for text in (capsys.readouterr().out, repr(dynamo_backends.load(path))):
        assert len(re.findall("calls? compiled by AOTInductor", text)) == 3
        assert re.search("in eager: aten.tanh.default, the option keep_in_eager names it", text)
    assert "libstdc++ ABI" in manifest(path)["machine"]["packages"]


def test_layouts_and_arguments_are_checked(saved: Any):
    _, path = saved("inductor")
    module, x = dynamo_backends.load(path), numbers(4, 8)
    turned = x.t().contiguous().t()
    assert torch.equal(module(turned), module(x))
    for other, text in ((x.int(), "int32"), (numbers(4, 9), r"\[4, 9\]"), (None, "None")):
        with pytest.raises(PackageError, match=text):
            module(other)


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)


def test_for_a_processor_with_other_instructions(saved: Any, monkeypatch: pytest.MonkeyPatch):
    model, path = saved("inductor_freezing")
    flags = " ".join(f for f in cpu_info.cpu_flags() if f != "sse2")
    monkeypatch.setattr(cpu_info, "_flags", lambda: f"flags : {flags}")
    monkeypatch.setattr(libraries, "open_library", refuse)
    no_compiler(monkeypatch)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        module = dynamo_backends.load(path)
        result = module(numbers(4, 8))
    (warning,) = told
    assert re.search("lacks sse2; inductor_freezing cannot run here: .*C.. compiler",
                     str(warning.message))  # fmt: skip
    assert module.backend == "eager"
    with torch.no_grad():
        torch.testing.assert_close(result, model(numbers(4, 8)))
    with pytest.raises(PackageError, match="strict=True does not allow"):
        dynamo_backends.load(path, strict=True)


def refuse(*_: Any) -> Any:
    raise AssertionError("code is loaded")


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("libstdc++ ABI", "before C++11", "ABI was before C.{2}11 .*and here C.{2}11"),
        ("torch", "2.0.1", r"torch was 2\.0\.1 .*and here"),
    ],
)
def test_of_another_torch(
    key: str, value: str, text: str, saved: Any, rewritten: Any, monkeypatch: pytest.MonkeyPatch
):
    _, path = saved("inductor")
    monkeypatch.setattr(libraries, "open_library", refuse)
    no_compiler(monkeypatch)
    other = rewritten(path, lambda found, _: found["machine"]["packages"].update({key: value}))
    with pytest.warns(UserWarning, match=text):
        assert dynamo_backends.load(other).backend == "eager"


def test_a_library_that_the_system_refuses(saved: Any, monkeypatch: pytest.MonkeyPatch):
    model, path = saved("inductor")

    def lacks(_: Any) -> Any:
        raise RuntimeError("libgomp.so.1: cannot open shared object file")

    monkeypatch.setattr(libraries, "open_library", lacks)
    no_compiler(monkeypatch)
    with pytest.warns(UserWarning, match=r"cannot be loaded: libgomp\.so\.1: cannot open"):
        module = dynamo_backends.load(path)
    with torch.no_grad():
        torch.testing.assert_close(module(numbers(4, 8)), model(numbers(4, 8)))
    with pytest.raises(PackageError, match=r"libgomp\.so\.1: .*strict=True does not allow"):
        dynamo_backends.load(path, strict=True)


def test_a_damaged_library_is_not_loaded(
    saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    _, path = saved("inductor")
    with zipfile.ZipFile(path) as file:
        (info, *_) = sorted(
            (i for i in file.infolist() if i.filename.startswith("executables")),
            key=lambda i: -i.file_size,
        )
    damaged = bytearray(path.read_bytes())
    damaged[info.header_offset + 30 + len(info.filename) + info.file_size // 2] ^= 1
    (tmp_path / "damaged.dbp").write_bytes(damaged)
    monkeypatch.setattr(libraries, "open_library", refuse)
    with pytest.raises(PackageError, match=f"damaged: .*{info.filename} is wrong"):
        dynamo_backends.load(tmp_path / "damaged.dbp")


def test_libraries_leave_no_files(saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dynamo_backends.load(saved("inductor")[1])(numbers(4, 8))
    assert list(tmp_path.iterdir()) == []


def test_the_fewest_weights_tell_libraries_apart():
    from dynamo_backends.inductor.libraries import _telling

    assert _telling([["a", "x"], ["a", "y"]]) == [1]
    assert _telling([["a", "x"], ["a", "y"], ["b", "y"]]) == [0, 1]


STEP = """
import shutil, sys
assert all(shutil.which(name) is None for name in ("gcc", "cc", "g++", "c++", "clang"))
import torch, dynamo_backends
step = dynamo_backends.load_step(sys.argv[1], strict=True)
assert step.program.from_disk
assert "torch._inductor.compile_fx" not in sys.modules
from tests.package.trained_steps import go_on
results = go_on(step, step.param_groups)
torch.save([results, step.state_dict()], sys.argv[1] + ".results")
"""


def test_a_step_goes_on_without_a_compiler(tmp_path: Path):
    # Adam would make steps of rounding errors: the bias before the batch norm has no gradient.
    training, path = Training("inductor", "sgd"), tmp_path / "step.dbp"
    training.step.save(path)
    run_without_compiler(STEP, path, tmp_path)
    found, state = torch.load(f"{path}.results")
    expected = go_on(training.step, training.optimizer.param_groups)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(state["model"], training.state()["model"])
    torch.testing.assert_close(state["optimizer"], training.state()["optimizer"])


def test_a_step_that_is_computed_wrong_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    step = simple(lambda m, o, x: update(m, o, m(x).square().mean()), "inductor")
    step(torch.rand(2, 3))
    right = libraries.open_library
    monkeypatch.setattr(
        libraries, "open_library", lambda library: lambda x: [y + 1 for y in right(library)(x)]
    )
    with pytest.raises(SaveError, match="compiled by AOTInductor is not right"):
        step.save(tmp_path / "step.dbp")

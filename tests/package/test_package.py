"""What comes out of a package is what went in."""

import copy
import re
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import dynamo_backends
from dynamo_backends import FallbackRefusedError, OptionError, PackageError, SaveError
from tests.package.conftest import LENGTHS, Small


def counted() -> dict[str, float]:
    found = dynamo_backends.counters()
    return {key: found[key] for key in ("executables", "cache_hits", "failed", "wrong")}


def expected(model: nn.Module, call: Any) -> Any:
    with torch.no_grad():
        return model(*call[0], **call[1])


@pytest.mark.parametrize("backend", ["onnxrt", "openxla", "ov"])
def test_results_are_the_saving_processs(backend: str, packages: Any, model: Small, call: Any):
    module = dynamo_backends.load(packages(backend), strict=True)
    before = counted()
    result = module(*call[0], **call[1])
    torch.testing.assert_close(result, expected(model, call))
    assert counted() == before, "nothing is compiled when it is called"
    (report,) = module.reports
    assert (report.executables, report.cache_hits) == (1, 1)
    assert report.ops_in_eager == 0
    assert not report.events


def sized(call: Any, length: int) -> Any:
    (x,), kwargs = call
    mask = kwargs["mask"]
    return (x.repeat(1, 8, 1)[:, :length] + length,), {"mask": mask.repeat(1, 8)[:, :length]}


@pytest.mark.parametrize(("backend", "programs"), [("onnxrt", 1), ("ov", 1), ("openxla", 4)])
def test_one_file_serves_a_range(
    backend: str, programs: int, packages: Any, model: Small, call: Any
):
    module = dynamo_backends.load(packages(backend, dynamic=True), strict=True)
    for length in LENGTHS:
        other = sized(call, length)
        torch.testing.assert_close(module(*other[0], **other[1]), expected(model, other))
    (report,) = module.reports
    assert report.executables == report.cache_hits == programs
    assert not report.events
    assert report.ops_in_eager == 0
    too_long = (torch.rand(2, 33, 8),), {"mask": torch.zeros(2, 33, dtype=torch.bool)}
    with pytest.raises(PackageError, match=r"x is float32\[2, 33, 8\], .* s\d+ 2 to 32"):
        module(*too_long[0], **too_long[1])
    with pytest.raises(PackageError, match=r"mask is bool\[2, 5\]"):
        module(torch.rand(2, 4, 8), mask=torch.zeros(2, 5, dtype=torch.bool))


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((), {}, r"saved for calls with x: float32\[2, 4, 8\], mask=bool\[2, 4\]"),
        ((torch.rand(2, 4, 8),), {}, "saved for calls with"),
        ((torch.rand(2, 4, 8), None, 3.0), {}, "saved for calls with"),
        ((torch.rand(2, 4, 9),), {"mask": torch.ones(2, 4) > 0}, r"x is float32\[2, 4, 9\]"),
        ((torch.rand(2, 4, 8).double(),), {"mask": torch.ones(2, 4) > 0}, "x is float64"),
        ((torch.rand(2, 4, 8),), {"mask": None}, "mask is None"),
        ((torch.rand(2, 4, 8),), {"mask": [torch.ones(2, 4) > 0]}, "a different structure"),
    ],
)
def test_other_arguments_are_refused(packages: Any, args: Any, kwargs: Any, text: str):
    module = dynamo_backends.load(packages("onnxrt"))
    with pytest.raises(PackageError, match=text):
        module(*args, **kwargs)


def test_arguments_may_be_named(packages: Any, call: Any):
    module = dynamo_backends.load(packages("onnxrt"))
    named = module(mask=call[1]["mask"], x=call[0][0])
    torch.testing.assert_close(named, module(*call[0], **call[1]), rtol=0, atol=0)


def test_layouts_gradients_and_autocast_of_the_caller(packages: Any, model: Small, call: Any):
    module = dynamo_backends.load(packages("onnxrt"))
    x = call[0][0].transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = module(x, **call[1])
    assert result["states"].dtype == torch.float32
    assert not result["states"].requires_grad
    torch.testing.assert_close(result, expected(model, call))


def test_threads_get_their_own_results(packages: Any, model: Small, call: Any):
    module = dynamo_backends.load(packages("openxla", dynamic=True))
    wrong: list[int] = []

    def run(first: int) -> None:
        for i in range(10):
            other = sized(call, LENGTHS[(first + i) % len(LENGTHS)])
            result, right = module(*other[0], **other[1]), expected(model, other)
            if not torch.allclose(result["states"], right["states"], rtol=1e-4, atol=1e-5):
                wrong.append(first)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert all(report.executables == report.cache_hits for report in module.reports)


def test_explain_says_what_runs_where(packages: Any):
    module = dynamo_backends.load(packages("onnxrt"))
    said = module.explain()
    assert said.backend == "onnxrt"
    assert len(said.graphs) == 1
    assert said.reports[0].cache_hits == 1
    assert "aten.native_layer_norm.default" in said.graphs[0].operators
    assert "onnxrt" in str(said)
    shown = repr(module)
    assert "backend='onnxrt'" in shown
    assert re.search(r"\d tensors of [\d.]+ K?i?B, saved with torch ", shown)
    assert "onnxruntime 1." in shown
    assert repr(copy.deepcopy(module)) == shown


def test_the_portable_form_computes_the_same(packages: Any, model: Small, call: Any):
    module = dynamo_backends.load(packages("openxla"))
    torch.testing.assert_close(module.in_eager(*call[0], **call[1]), expected(model, call))


def test_executables_that_cannot_be_saved_are_said_so(model: Small, call: Any, tmp_path: Path):
    path = tmp_path / "m.dbp"
    with pytest.warns(UserWarning, match="those of ofi cannot be saved"):
        dynamo_backends.save(model, path, *call, backend="ofi")
    module = dynamo_backends.load(path)
    torch.testing.assert_close(module(*call[0], **call[1]), expected(model, call))
    assert module.backend == "ofi"
    assert "no executables" in module.notes[0]
    with pytest.raises(
        PackageError,
        match=r"the package contains no executables of ofi\. strict=True does not allow",
    ):
        dynamo_backends.load(path, strict=True)


def test_eager_has_the_portable_form_alone(model: Small, call: Any, tmp_path: Path):
    dynamo_backends.save(model, tmp_path / "m.dbp", *call, backend="eager")
    module = dynamo_backends.load(tmp_path / "m.dbp", strict=True)
    torch.testing.assert_close(module(*call[0], **call[1]), expected(model, call))
    assert module.backend == "eager"
    assert module.reports == ()


def test_autotune_chooses_when_it_saves(model: Small, call: Any, tmp_path: Path):
    path, options = tmp_path / "m.dbp", {"candidates": ["onnxrt"], "budget_s": 20}
    dynamo_backends.save(model, path, *call, backend="autotune", options=options)
    module = dynamo_backends.load(path, strict=True)
    assert module.backend in ("onnxrt", "eager")
    assert module.notes == (f"autotune chose {module.backend} when the package was saved",)
    torch.testing.assert_close(module(*call[0], **call[1]), expected(model, call))


def test_options_are_kept(model: Small, call: Any, tmp_path: Path):
    path = tmp_path / "m.dbp"
    options = {"verify": "off", "keep_in_eager": ("aten.relu",)}
    dynamo_backends.save(model, path, *call, backend="onnxrt", options=options)
    module = dynamo_backends.load(path, strict=True)
    torch.testing.assert_close(module(*call[0], **call[1]), expected(model, call))
    (report,) = module.reports
    assert [f.op for f in report.fallbacks] == ["aten.relu.default"]
    assert report.verified == 0
    assert report.executables == report.cache_hits == 2
    with pytest.raises(OptionError, match="no option 'speed'"):
        dynamo_backends.save(model, path, *call, backend="onnxrt", options={"speed": 1})


def test_weights_may_be_a_checkpoints(model: Small, call: Any, tmp_path: Path):
    from safetensors.torch import save_file

    checkpoint, path = tmp_path / "small.safetensors", tmp_path / "m.dbp"
    state = {name: t.clone() for name, t in model.state_dict().items() if name != "scale"}
    save_file(state, checkpoint)
    dynamo_backends.save(model, path, *call, backend="onnxrt", checkpoint=checkpoint)
    module = dynamo_backends.load(path, strict=True)
    torch.testing.assert_close(module(*call[0], **call[1]), expected(model, call))
    moved = checkpoint.rename(tmp_path / "moved.safetensors")
    with pytest.raises(PackageError, match=r"reads weights from small\.safetensors"):
        dynamo_backends.load(path)
    dynamo_backends.load(path, checkpoint=moved)
    state["norm.bias"] += 1
    save_file(state, checkpoint)
    with pytest.raises(PackageError, match="not the checkpoint that the package was saved with"):
        dynamo_backends.load(path)
    with pytest.raises(SaveError, match="contains none of the model's weights"):
        dynamo_backends.save(nn.Linear(8, 8), path, (call[0][0],), checkpoint=checkpoint)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x - 1


class Halves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(2, x.shape[0] // 2, 8)


@pytest.mark.parametrize(
    ("model", "shapes", "text"),
    [
        (Counting(), None, "updates calls in each call"),
        (nn.BatchNorm1d(8), None, r"updates num_batches_tracked.*model.eval\(\)"),
        (Branching(), None, "torch.export cannot capture Branching"),
        (Halves(), ({0: torch.export.Dim.AUTO},), "the graph is valid only if"),
    ],
)
def test_what_cannot_be_saved_says_why(model: Any, shapes: Any, text: str, tmp_path: Path):
    path = tmp_path / "m.dbp"
    with pytest.raises(SaveError, match=text):
        dynamo_backends.save(model, path, (torch.rand(4, 8),), dynamic_shapes=shapes)
    assert list(tmp_path.iterdir()) == []


class Pairs(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        return (y + 1).relu().view(-1, 2, 8).sum(1)


def test_a_multiple_of_a_size_that_no_argument_has_runs_in_eager(tmp_path: Path):
    y, path = torch.rand(6, 8), tmp_path / "m.dbp"
    shapes = ({0: 2 * torch.export.Dim("batch", min=2, max=8)},)
    dynamo_backends.save(Pairs(), path, (y,), dynamic_shapes=shapes, backend="eager")
    module = dynamo_backends.load(path)
    for n in (4, 10, 16):
        y = torch.rand(n, 8)
        torch.testing.assert_close(module(y), Pairs()(y))
    for n in (2, 7, 18):
        with pytest.raises(PackageError, match=rf"y is float32\[{n}, 8\]"):
            module(torch.rand(n, 8))


class Scaled(nn.Module):
    def forward(self, x: Tensor, times: int = 2, mode: str = "sum") -> Any:
        y = (x + 1).relu() * times
        return y.sum(-1) if mode == "sum" else y, times


def test_numbers_and_texts_are_what_they_were(tmp_path: Path):
    x, path = torch.rand(3, 4), tmp_path / "m.dbp"
    dynamo_backends.save(Scaled(), path, (x, 3, "sum"), backend="onnxrt")
    module = dynamo_backends.load(path)
    torch.testing.assert_close(module(x, 3, mode="sum"), Scaled()(x, 3))
    with pytest.raises(PackageError, match="times is 4, but the model was saved for 3"):
        module(x, 4, "sum")


def test_a_number_may_vary(tmp_path: Path):
    x, path = torch.rand(3, 4), tmp_path / "m.dbp"
    shapes = (None, torch.export.Dim.DYNAMIC)
    dynamo_backends.save(Scaled(), path, (x, 3), dynamic_shapes=shapes, backend="onnxrt")
    module = dynamo_backends.load(path)
    for times in (5, 8):
        result = module(x, times)
        torch.testing.assert_close(result, Scaled()(x, times))
        assert type(result[1]) is int


def test_dynamo_does_not_look_into_it(packages: Any, call: Any):
    module = dynamo_backends.load(packages("onnxrt"))
    frames = CompileCounter()
    compiled = torch.compile(lambda x, mask: module(x * 2, mask=mask)["states"] + 1, backend=frames)
    (x,), kwargs = call
    right = module(x * 2, **kwargs)["states"] + 1
    torch.testing.assert_close(compiled(x, kwargs["mask"]), right, rtol=0, atol=0)
    assert (frames.frame_count, frames.op_count) == (2, 2)  # before and after the call


def test_a_folder_that_is_missing_is_said_before_anything_is_compiled(model: Small, tmp_path: Path):
    with pytest.raises(SaveError, match="there is no folder"):
        dynamo_backends.save(model, tmp_path / "none" / "m.dbp", ())


def test_the_order_of_former_versions_is_deprecated(model: Small, call: Any, tmp_path: Path):
    path: Any = tmp_path / "m.dbp"
    with pytest.warns(DeprecationWarning, match=r"Use save\(model, path\)") as warned:
        dynamo_backends.save(path, model, *call, backend="eager")  # type: ignore[arg-type]
    assert warned[0].filename == __file__
    args, kwargs = call
    assert dynamo_backends.load(path)(*args, **kwargs) is not None
    with pytest.warns(DeprecationWarning, match=r"Use export\(model, path\)"):
        dynamo_backends.export(tmp_path / "m.onnx", nn.Linear(4, 4), (torch.rand(2, 4),))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="save takes a module and a path, not PosixPath first"):
        dynamo_backends.save(path, "model", *call)  # type: ignore[arg-type]


def test_threads_may_load_at_once(packages: Any, model: Small, call: Any):
    path, results = packages("onnxrt", dynamic=True), []

    def load() -> None:
        results.append(dynamo_backends.load(path, strict=True)(*call[0], **call[1]))

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for result in results:
        torch.testing.assert_close(result, expected(model, call))


@pytest.mark.plants_errors
@pytest.mark.parametrize("verify", ["first", "off"])
def test_what_is_compiled_wrong_is_not_saved(
    verify: str, model: Small, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from dynamo_backends.ort.runtime import OrtExecutable

    right = OrtExecutable.bind

    def wrong(self: Any, weights: Any) -> Any:
        bound, copied = right(self, weights)
        if len(weights) < 4:  # of a trial
            return bound, copied
        return lambda activations: [x + 1 for x in bound(activations)], copied

    monkeypatch.setattr(OrtExecutable, "bind", wrong)
    options = {"verify": verify}
    with pytest.raises(SaveError, match=r"wrong results and is not saved: .*output 0 differs"):
        dynamo_backends.save(model, tmp_path / "m.dbp", *call, backend="onnxrt", options=options)
    assert [path for path in tmp_path.iterdir() if path.name != "cache"] == []


@pytest.mark.parametrize("verify", ["first", "always"])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_was_compared_when_it_was_saved_is_not_compared_again(
    verify: str,
    elsewhere: bool,
    model: Small,
    call: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    from dynamo_backends.package import loading
    from dynamo_backends.verify.first_call import Comparison

    path, compared = tmp_path / "m.dbp", []
    dynamo_backends.save(model, path, *call, backend="onnxrt", options={"verify": verify})
    right = Comparison.__call__

    def noted(self: Comparison, *args: Any) -> Any:
        compared.append(args)
        return right(self, *args)

    monkeypatch.setattr(Comparison, "__call__", noted)
    if elsewhere:  # what is compiled here was compared nowhere
        monkeypatch.setattr(loading, "differences", lambda there, here: ["another machine"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = dynamo_backends.load(path)
    for _ in range(2):
        torch.testing.assert_close(loaded(*call[0], **call[1]), expected(model, call))
    times = {"first": int(elsewhere), "always": 2}[verify]
    assert len(compared) == times * loaded.reports[0].blocks


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.arange(4.0), persistent=False)
        self.offset = torch.tensor([0.5, 1.5, 2.5, 3.5])
        self.weight = nn.Parameter(torch.rand(4, 6).t())  # column-major
        self.part = nn.Parameter(torch.rand(10)[3:7])

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.steps + self.offset - torch.tensor([1.0, 2.0, 3.0, 4.0])
        return (y + self.part) @ self.weight.t()


@pytest.mark.parametrize("backend", ["openxla", "onnxrt"])
def test_constants_and_odd_weights_are_kept(backend: str, tmp_path: Path):
    torch.manual_seed(0)
    model, x, path = Constants(), torch.rand(3, 4), tmp_path / "m.dbp"
    dynamo_backends.save(model, path, (x,), backend=backend)
    result = dynamo_backends.load(path, strict=True)(x)
    torch.testing.assert_close(result, model(x).detach())
    assert path.stat().st_size < 1 << 18


def test_fallback_may_be_refused_elsewhere(
    model: Small, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from dynamo_backends.interface.plan import Support
    from dynamo_backends.ort.backend import OnnxRuntime
    from dynamo_backends.package import machine

    path, options = tmp_path / "m.dbp", {"fallback": "error"}
    dynamo_backends.save(model, path, *call, backend="onnxrt", options=options)
    dynamo_backends.load(path, strict=True)
    monkeypatch.setattr(machine, "source_digest", lambda: "another")
    monkeypatch.setattr(OnnxRuntime, "supports", lambda *_: Support(False, "it is Monday"))
    with pytest.raises(FallbackRefusedError, match="it is Monday"):
        dynamo_backends.load(path)

"""Programs that are linked: without their graph, and with it where they fail or are told to."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends.package import linking
from dynamo_backends.package.archive import Archive
from tests.package.conftest import Small
from tests.package.test_package import expected


def record(path: Path) -> Any:
    with Archive(path) as archive:
        return archive.manifest["linked"]


def is_built(module: Any) -> bool:
    """Whether anybody has asked for the graph."""
    return "portable" in vars(module)


@pytest.mark.parametrize("backend", ["onnxrt", "openxla", "ov"])
def test_no_graph_is_built(backend: str, packages: Any, model: Small, call: Any):
    module = dynamo_backends.load(packages(backend), strict=True)
    torch.testing.assert_close(module(*call[0], **call[1]), expected(model, call))
    assert not is_built(module)
    whole = module.explain()
    assert is_built(module)
    assert whole.reports[0].parts[0].runs_on == backend
    assert [x.name for x in whole.reports[0].inputs if x.role == "activation"] == ["x", "mask"]


class Mixed(nn.Module):
    """Has an eager part between two blocks, a constant, and a result that is an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, int, Tensor]:
        y = self.first(x).relu() * torch.tensor([1.0, 2.0] * 4)
        z = y.to(torch.float64).cumsum(1).to(torch.float32)
        return self.second(z).relu().sum(-1, keepdim=True), x, 3, z


@pytest.mark.parametrize("backend", ["onnxrt", "openxla"])
def test_eager_parts_and_constants_are_linked(backend: str, tmp_path: Path):
    torch.manual_seed(0)
    model, x, path = Mixed().eval(), torch.rand(3, 8), tmp_path / "m.dbp"
    options = {"keep_in_eager": ("cumsum",), "min_block_size": 1}
    dynamo_backends.save(model, path, (x,), backend=backend, options=options)
    kinds = ["calls" in part for part in record(path)["program"]["parts"]]
    assert kinds == [False, True, False]
    module = dynamo_backends.load(path, strict=True)
    other = torch.rand(3, 8)
    torch.testing.assert_close(module(other), tuple(model(other)))
    assert not is_built(module)
    (report,) = module.reports
    assert report.executables == report.cache_hits == 2
    assert [f.op for f in report.fallbacks] == ["aten.cumsum.default"]


def test_where_a_linked_program_fails_its_graph_runs(
    packages: Any, model: Small, call: Any, monkeypatch: pytest.MonkeyPatch
):
    from dynamo_backends.ort.runtime import OrtExecutable

    module = dynamo_backends.load(packages("onnxrt"))

    def fail(*_: Any) -> Any:
        raise RuntimeError("it is Monday")

    monkeypatch.setattr(OrtExecutable, "bind", fail)
    for _ in range(2):
        torch.testing.assert_close(module(*call[0], **call[1]), expected(model, call))
    (event,) = module.reports[0].events
    assert (event.kind, event.region) == ("failed", "graph")
    assert "it is Monday" in event.reason


def test_what_is_linked_wrong_is_not_linked(
    model: Small, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    right, path = linking.linked, tmp_path / "m.dbp"

    def wrong(*args: Any) -> Any:
        run = right(*args)
        return lambda values: [x + 1 if isinstance(x, Tensor) else x for x in run(values)]

    monkeypatch.setattr(linking, "linked", wrong)
    dynamo_backends.save(model, path, *call, backend="onnxrt")
    assert record(path) is None
    torch.testing.assert_close(
        dynamo_backends.load(path, strict=True)(*call[0], **call[1]), expected(model, call)
    )


def test_sizes_that_change_and_calls_that_are_compared_need_the_graph(
    packages: Any, model: Small, call: Any, tmp_path: Path
):
    assert record(packages("onnxrt", dynamic=True)) is None
    path, options = tmp_path / "m.dbp", {"verify": "always"}
    dynamo_backends.save(model, path, *call, backend="onnxrt", options=options)
    assert record(path) is None


def test_a_record_that_does_not_fit_is_done_without(
    packages: Any, model: Small, call: Any, rewritten: Any
):
    def swap(manifest: Any, _: Any) -> None:
        manifest["linked"]["program"]["parts"][0]["values"][0]["shape"] = [-1, 8]

    module = dynamo_backends.load(rewritten(packages("onnxrt"), swap), strict=True)
    torch.testing.assert_close(module(*call[0], **call[1]), expected(model, call))


def test_calls_of_a_record_are_checked(tmp_path: Path, rewritten: Any, call: Any):
    x, path = torch.rand(3, 8), tmp_path / "m.dbp"
    options = {"keep_in_eager": ("cumsum",), "min_block_size": 1}
    dynamo_backends.save(Mixed().eval(), path, (x,), backend="onnxrt", options=options)

    def change(manifest: Any, _: Any) -> None:
        text = json.dumps(manifest["linked"]).replace("torch.ops.aten.cumsum.default", "torch.load")
        manifest["linked"] = json.loads(text)

    module = dynamo_backends.load(rewritten(path, change))
    assert module(x)[2] == 3  # by the graph
    assert module.reports[0].executables == 2


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        pairs = self.linear(y).relu().view(-1, 2, 8).sum(1)
        return self.linear(x).relu() + pairs


@pytest.mark.parametrize("backend", ["onnxrt", "openxla"])
def test_derived_dimensions_are_served(backend: str, tmp_path: Path):
    model, path, batch = Pairs().eval(), tmp_path / "m.dbp", torch.export.Dim("batch", min=2, max=8)
    shapes = ({0: batch}, {0: 2 * batch})
    args = torch.rand(3, 8), torch.rand(6, 8)
    dynamo_backends.save(model, path, args, dynamic_shapes=shapes, backend=backend)
    module = dynamo_backends.load(path, strict=True)
    for n in (2, 5, 8):
        x, y = torch.rand(n, 8), torch.rand(2 * n, 8)
        torch.testing.assert_close(module(x, y), model(x, y).detach())
    (report,) = module.reports
    assert report.ops_in_eager == 0
    assert report.executables == report.cache_hits > 0
    with pytest.raises(dynamo_backends.PackageError, match=r"y is float32\[5, 8\]"):
        module(torch.rand(3, 8), torch.rand(5, 8))

"""Torch keeps what was compiled: the next process captures nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import dynamo_backends
import harness
from dynamo_backends import _torch_private as private
from dynamo_backends.interface.errors import SaveError
from dynamo_backends.interface.registry import get_backend
from dynamo_backends.pipeline.captured import compile_captured
from dynamo_backends.workers.worker_process import child_environment


class Net(nn.Module):
    """Weights, buffers that change, a constant, a view and, in training, draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2)
        )
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layers(x).mean((2, 3)) + torch.tensor([1.0] * 8)
        return self.head(y), x.flatten(1)


def make() -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(4, 3, 16, 16)


def infer(backend: str) -> Any:
    model, x = make()
    model.eval()
    with torch.no_grad():
        return torch.compile(model, backend=backend)(x)


def train(backend: str) -> Any:
    model, x = make()
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        (compiled(x)[0] ** 2).mean().backward()
    return [p.grad for p in model.parameters()], dict(model.named_buffers())


def of_any_batch(backend: str) -> Any:
    model, x = make()
    model.eval()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    with torch.no_grad():
        return compiled(x), compiled(x[:3])


def breaks(backend: str) -> Any:
    model, x = make()
    model.eval()
    compiled = torch.compile(_printed, backend=backend)
    with torch.no_grad():
        return compiled(model, x)


def _printed(model: Net, x: Tensor) -> Tensor:
    y, _ = model(x)
    print(end="")
    return torch.relu(y) * 2


PROGRAMS: dict[str, Callable[[str], Any]] = {
    f.__name__: f for f in (infer, train, of_any_batch, breaks)
}


def process(program: str, backend: str, results: str) -> None:
    """What a process does: runs, keeps what it compiled, and says what it had to do."""
    with dynamo_backends.record() as reports:
        outcome = PROGRAMS[program](backend)
    torch.compiler.save_cache_artifacts()
    torch.save(outcome, results)
    harness.hand_back(
        captured=private.dynamo_counters()["stats"]["unique_graphs"],
        executables=sum(r.executables for r in reports),
        hits=sum(r.cache_hits for r in reports),
    )


def run(program: str, backend: str, folder: Path) -> tuple[int, int, int, Any]:
    results = str(folder / "results.pt")
    code = f"from {__name__} import process; process{program, backend, results}"
    variables = {
        "TORCH_CACHING_PRECOMPILE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"),
        "DYNAMO_BACKENDS_CACHE": str(folder / "executables"),
    }
    had_to = harness.run_child(["-c", code], {**child_environment(), **variables})
    return had_to["captured"], had_to["executables"], had_to["hits"], torch.load(results)


@pytest.mark.parametrize(
    ("program", "backend"),
    [("infer", "openxla"), ("train", "openxla"), ("breaks", "onnxrt"), ("of_any_batch", "openxla")],
)
def test_a_second_process_captures_nothing(program: str, backend: str, tmp_path: Path) -> None:
    captured, executables, hits, first = run(program, backend, tmp_path)
    assert captured > 0
    assert executables > hits
    captured, executables, hits, second = run(program, backend, tmp_path)
    assert captured == 0
    assert executables == hits > 0
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    eager = PROGRAMS[program]("eager")
    torch.testing.assert_close(second, eager)


@torch._dynamo.config.patch(caching_precompile=True)
@torch.no_grad()
def test_what_another_backend_kept_is_not_taken() -> None:
    """AOT Autograd's own cache is asked with the backend and its options in the key."""
    model, x = make()
    model.eval()
    expected = model(x)
    for backend, options in (("inductor", {}), ("openxla", {}), ("openxla", {"freezing": "off"})):
        torch._dynamo.reset()
        with dynamo_backends.record() as reports:
            results = torch.compile(model, backend=backend, options=options)(x)
        torch.testing.assert_close(results, expected)
        assert [r.backend for r in reports] == ["openxla"] * (backend == "openxla")
        assert all(
            i.frozen == (not options) for r in reports for i in r.inputs if i.role == "parameter"
        )


class Labelled(Tensor):
    """A subclass that adds nothing."""


def as_unregistered(captured: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compiles with a backend to which its name does not lead."""
    backend = type(get_backend("openxla"))()
    return compile_captured(backend, captured, inputs, backend.Options())


def as_unknown(captured: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compiles with a backend whose name leads nowhere."""
    backend = type(get_backend("openxla"))()
    backend.name = "unheard of"
    return compile_captured(backend, captured, inputs, backend.Options())


@torch._dynamo.config.patch(caching_precompile=True)
@torch.no_grad()
@pytest.mark.parametrize("backend", [as_unregistered, as_unknown])
def test_a_compiler_that_cannot_be_pickled_keeps_nothing(backend: Any) -> None:
    model, x = make()
    model.eval()
    results = torch.compile(model, backend=backend)(x)
    torch.testing.assert_close(results, model(x))


@torch._dynamo.config.patch(caching_precompile=True)
@torch.no_grad()
def test_a_graph_that_cannot_be_packed_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: fx.GraphModule) -> bytes:
        raise TypeError("no bytes today")

    monkeypatch.setattr("dynamo_backends._torch_private.precompile.pack", refuse)
    model, x = make()
    model, x = model.eval(), x[:3]  # no test before this one has kept a graph of that size
    results = torch.compile(model, backend="openxla")(x)
    torch.testing.assert_close(results, model(x))
    assert "no bytes today" in caplog.text


@torch._dynamo.config.patch(enable_aot_compile=True)
@pytest.mark.parametrize("backend", ["openxla", "onnxrt"])
def test_a_function_is_saved_to_a_file(backend: str, tmp_path: Path) -> None:
    model, x = make()
    model.eval()
    path = tmp_path / "net"
    with torch.no_grad():
        expected = model(x)
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        compiled.forward.aot_compile(((x,), {})).save_compiled_function(str(path))
        torch._dynamo.reset()
        with path.open("rb") as file, dynamo_backends.record() as reports:
            loaded = torch.compiler.load_compiled_function(file)
            results = loaded(model, x)
    torch.testing.assert_close(results, expected)
    assert [r.backend for r in reports] == [backend]


def doubled(x: Tensor) -> Tensor:
    return x * 2


@torch._dynamo.config.patch(enable_aot_compile=True)
def test_what_another_version_kept_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = torch.compile(doubled, backend="openxla", fullgraph=True)
    path = tmp_path / "doubled"
    compiled.aot_compile(((torch.ones(2),), {})).save_compiled_function(str(path))
    monkeypatch.setattr(
        "dynamo_backends.pipeline.captured.source_digest", lambda: "of another version"
    )
    with path.open("rb") as file, pytest.raises(SaveError, match="by another version"):
        torch.compiler.load_compiled_function(file)


@torch._dynamo.config.patch(enable_aot_compile=True)
def test_what_cannot_be_saved_says_why() -> None:
    compiled = torch.compile(doubled, backend=as_unregistered, fullgraph=True)
    with pytest.raises(SaveError, match="cannot be saved to a file: the backend cannot be"):
        compiled.aot_compile(((torch.ones(2),), {}))
    compiled = torch.compile(doubled, backend="openxla", fullgraph=True)
    with pytest.raises(SaveError, match="cannot be saved to a file: an input is an instance"):
        compiled.aot_compile(((torch.ones(2).as_subclass(Labelled),), {}))

"""Where is compiled what no call waits for: in another process, and here if that cannot."""

import base64
import os
import pickle
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface import protocols
from dynamo_backends.interface.errors import CompileError, LoweringError, NotPaddedError
from dynamo_backends.interface.executable import Executable
from dynamo_backends.interface.plan import Plan
from dynamo_backends.interface.protocols import SavesExecutables
from dynamo_backends.interface.registry import get_backend
from dynamo_backends.pipeline import background, compiler_process, compiler_worker
from dynamo_backends.pipeline.compiler_process import CompileJob, CompilerProcess, encode_error
from dynamo_backends.pipeline.shapes import shared_programs
from dynamo_backends.workers.worker_process import child_environment
from tests.backend_checks import usable
from tests.test_ranges import Counting
from tests.verification.test_doubt import traced

BACKENDS = ("onnxrt", "ov", "openxla", "tvm", "iree")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.last(self.norm(self.first(x)).relu()), 1)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert background.wait_until_idle(120)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompilerProcess]:
    """Another process for this test alone."""
    made = CompilerProcess()
    monkeypatch.setattr(compiler_process, "process", made)
    yield made
    made.end()


def compiled(fn: Callable[..., Any], backend: str, **settings: Any) -> Callable[..., Any]:
    options = {"while_compiling": "eager", "min_block_size": 1, **settings}
    return torch.compile(fn, backend=backend, dynamic=True, options=options)


def refuse(*_: Any) -> Any:
    raise AssertionError("this process does it")


@torch.no_grad()
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_elsewhere(backend: str, cache: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(type(get_backend(usable(backend))), "compile", refuse)
    model = Net().eval()
    run = compiled(model, backend, cache=cache)
    with dynamo_backends.record() as reports:
        for size in (4, 7, 5):
            x = torch.randn(size, 6)
            torch.testing.assert_close(run(x), model(x))
            assert background.wait_until_idle(120)
            torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
    (report,) = reports
    assert report.fallbacks == ()
    assert report.blocks == 1
    assert report.executables == (4 if backend == "openxla" else 1), "4, 8, and then 7 and 5"
    assert report.cache_hits == 0


def test_narrower_programs_are_compiled_elsewhere():
    def fn(x: Tensor) -> Tensor:
        return (x.softmax(0) * 2).sum(0)

    options = {"bucket_growth": 1.1, "cache": False, "min_block_size": 1}
    run = torch.compile(fn, backend="openxla", dynamic=True, options=options)
    with dynamo_backends.record() as reports, pytest.MonkeyPatch.context() as patch:
        run(torch.randn(60, 3))
        patch.setattr(type(get_backend("openxla")), "compile", refuse)
        for length in (20, 20, 9):
            x = torch.randn(length, 3)
            torch.testing.assert_close(run(x), fn(x))
        assert background.wait_until_idle(120)
    assert any("≤20" in s.shapes[0] for s in reports[0].traffic())


@torch.no_grad()
@pytest.mark.parametrize("backend", ["onnxrt", "openxla"])
def test_a_later_process_needs_none_to_load(
    fresh: CompilerProcess, backend: str, monkeypatch: pytest.MonkeyPatch
):
    model, x = Net().eval(), torch.randn(4, 6)
    for hits in (0, 1):
        torch._dynamo.reset()
        # In one process the second graph would share the first one's program.
        monkeypatch.setattr(shared_programs, "_ranged", weakref.WeakKeyDictionary())
        run = compiled(model, backend, fallback="error")
        with dynamo_backends.record() as reports:
            run(x)
            assert background.wait_until_idle(120)
            torch.testing.assert_close(run(x), model(x))
        assert reports[0].cache_hits == hits
        assert fresh.running == (hits == 0)
        fresh.end()


def test_trials_are_made_elsewhere(monkeypatch: pytest.MonkeyPatch):
    from dynamo_backends.ort import trial

    monkeypatch.setattr(trial, "_try", refuse)
    monkeypatch.setattr(trial._verdicts, "_shipped", False)
    monkeypatch.setattr(trial._verdicts, "_known", {})
    run = compiled(lambda x: torch.special.bessel_j0(x.cumsum(0) * 2), "onnxrt", cache=False)
    with dynamo_backends.record() as reports:
        run(torch.randn(5, 3))
        assert background.wait_until_idle(120)
    (report,) = reports
    assert [row.op for row in report.fallbacks] == ["aten.special_bessel_j0.default"]
    assert "has no lowering of it" in report.fallbacks[0].reason
    assert report.ops_on_backend == 2


def test_backward_graphs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(type(get_backend("onnxrt")), "compile", refuse)
    model = Net()
    run = compiled(model, "onnxrt")
    with dynamo_backends.record() as reports:
        for size in (4, 6):
            x = torch.randn(size, 6)
            (expected,) = torch.autograd.grad(model(x).square().sum(), [model.first.weight])
            for _ in range(2):
                (found,) = torch.autograd.grad(run(x).square().sum(), [model.first.weight])
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
                assert background.wait_until_idle(120)
    assert [report.kind for report in reports] == ["forward", "backward"]
    assert all(report.executables for report in reports)
    assert not any(report.events for report in reports)


def test_a_crash_leaves_the_graph_in_eager_with_the_reason(
    fresh: CompilerProcess, monkeypatch: pytest.MonkeyPatch
):
    asked = fresh._process.ask
    crashed: list[int] = []

    def ask(request: dict[str, Any], limit_s: float | None) -> dict[str, Any]:
        if request and not crashed:
            child = fresh._process._child
            assert child is not None
            crashed.append(child.pid)
            os.kill(child.pid, signal.SIGSEGV)
        return asked(request, limit_s)

    monkeypatch.setattr(fresh._process, "ask", ask)
    with dynamo_backends.record() as reports:
        for function in (lambda x: x.sin() * 2, lambda x: x.cos() * 3):
            run = compiled(function, "onnxrt", cache=False)
            x = torch.randn(3)
            for _ in range(2):
                torch.testing.assert_close(run(x), function(x))
                assert background.wait_until_idle(120)
    lost, made = reports
    assert (
        "the compiler process was lost: its process ended with status -11"
        in lost.fallbacks[0].reason
    )
    assert made.fallbacks == ()
    assert made.ops_on_backend == 2


def test_without_another_process_this_one_compiles(
    fresh: CompilerProcess, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(fresh._process, "_command", ("-c", "raise SystemExit(3)"))
    run = compiled(lambda x: x.cos() * 2, "onnxrt", cache=False)
    with dynamo_backends.record() as reports:
        run(torch.randn(3))
        assert background.wait_until_idle(120)
    assert fresh.is_unusable
    assert reports[0].ops_on_backend == 2
    assert capfd.readouterr() == ("", "")


def test_backends_that_no_other_process_knows_compile_here(fresh: CompilerProcess):
    class Keeping(Counting):
        name = "onnxrt"

        def cache_key(self, options: Any) -> str:
            return "1"

        def load(self, parts: Any, graph: Graph, options: Any) -> Any:
            raise AssertionError("nothing is loaded")

    assert isinstance(Keeping(), SavesExecutables)
    graph = small()
    here = compiler_process._done("compile", Keeping(), Keeping.Options(), Plan(), graph)
    assert here is None
    assert not fresh.running


def small() -> Graph:
    return traced(lambda x: (x.sin() + 1,), torch.randn(3))


def job(**changes: Any) -> dict[str, Any]:
    """A request to compile a small graph."""
    backend, graph = get_backend("onnxrt"), small()
    options = backend.Options()
    given = {
        "task": "compile",
        "backend": "onnxrt",
        "options": options,
        "graph": compiler_process._packed(graph),
        "kind": graph.kind,
        "inputs": graph.inputs,
        "plan": Plan(),
        "cache_key": protocols.cache_key(backend, options),
        "threads": torch.get_num_threads(),
        "precision": "highest",
        "environment": child_environment(),
    }
    return {"job": base64.b64encode(pickle.dumps(CompileJob(**{**given, **changes}))).decode()}


def test_the_other_process_answers():
    made = compiler_worker.handle_request(job())
    parts = {name: base64.b64decode(text) for name, text in made["parts"].items()}
    backend = get_backend("onnxrt")
    loaded: Executable = backend.load(parts, small(), backend.Options())
    x = torch.randn(3)
    torch.testing.assert_close(loaded.bind(())[0]([x])[0], x.sin() + 1)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"cache_key": "of another machine"}, "has another version or configuration"),
        ({"backend": "mine"}, "there is no backend 'mine'"),
        ({"graph": b"damaged"}, "UnpicklingError"),
    ],
)
def test_what_the_other_process_cannot_do_it_says(changes: dict[str, Any], why: str):
    assert why in compiler_worker.handle_request(job(**changes))["unable"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (LoweringError("add_1", "aten.add", "no"), LoweringError("add_1", "aten.add", "no")),
        (NotPaddedError("aten.sort", "no"), NotPaddedError("aten.sort", "no")),
        (CompileError("the vendor refuses"), CompileError("the vendor refuses")),
        (KeyError("x"), CompileError("KeyError: 'x'")),
    ],
)
def test_errors_arrive_as_they_were(
    error: Exception,
    expected: Exception,
    fresh: CompilerProcess,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(fresh._process, "ask", lambda *_: encode_error(error))
    with pytest.raises(type(expected)) as raised:
        fresh.run_job(CompileJob(*[None] * 11))  # type: ignore[arg-type]
    assert str(raised.value) == str(expected)
    assert vars(raised.value) == vars(expected)


@pytest.mark.long
def test_it_ends_after_a_while_without_work(
    fresh: CompilerProcess, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(type(background._worker), "idle_s", 0.2)
    run = compiled(lambda x: x.cos() * 3, "onnxrt", cache=False)
    run(torch.randn(3))
    assert background.wait_until_idle(120)
    until(lambda: not fresh.running)


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
def test_calls_go_before_its_imports():
    process = CompilerProcess()._process
    try:
        pid = process._start().pid
        mine = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, pid) == mine + compiler_process.NICE
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
    finally:
        process.end()


def test_it_ends_with_its_parent():
    code = """
import os
from dynamo_backends.pipeline.compiler_process import process
assert process._started()
print(process._process._child.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
        env=child_environment(),
    )
    assert done.returncode == -signal.SIGKILL
    (pid,) = map(int, done.stdout.split())
    until(lambda: not Path(f"/proc/{pid}/cmdline").exists() or is_zombie(pid))


def is_zombie(pid: int) -> bool:
    """Whether a process has ended, and nobody has asked for its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def until(holds: Callable[[], bool]) -> None:
    """Waits until something holds."""
    end = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)

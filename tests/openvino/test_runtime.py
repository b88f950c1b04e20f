"""Compiled models and requests: threads, precision, memory, changing weights, shapes, processes."""

import os
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import dynamo_backends
from dynamo_backends.interface.errors import ForkedProcessError
from dynamo_backends.openvino import runtime
from dynamo_backends.openvino.core_api import compile_model, find_passthrough_outputs, get_core
from dynamo_backends.runtime.freed_memory import return_free_memory
from dynamo_backends.workers.memory import rss_bytes
from tests import backend_checks as checks
from tests.backend_checks import mlp
from tests.checking import check

compiled = partial(checks.compiled, "ov")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every model that is compiled for an executable from now on."""
    models: list[Any] = []

    def watch(*args: Any) -> Any:
        models.append(compile_model(*args))
        return models[-1]

    monkeypatch.setattr(runtime, "compile_model", watch)
    return models


def properties(model: Any, *names: str) -> list[str]:
    return [str(model.get_property(name)) for name in names]


def test_float32_on_torchs_threads_without_pinning(made: list[Any]):
    compiled(mlp(), torch.randn(2, 6))
    assert properties(
        made[-1], "INFERENCE_PRECISION_HINT", "INFERENCE_NUM_THREADS", "ENABLE_CPU_PINNING"
    ) == ["<Type: 'float32'>", str(torch.get_num_threads()), "False"]
    assert properties(made[-1], "PERFORMANCE_HINT") == ["LATENCY"]


def test_options_reach_the_model(made: list[Any]):
    compiled(
        mlp(),
        torch.randn(2, 6),
        performance_hint="throughput",
        num_threads=1,
        config={"PERF_COUNT": True},
    )
    assert properties(made[-1], "PERFORMANCE_HINT", "INFERENCE_NUM_THREADS", "PERF_COUNT") == [
        "THROUGHPUT",
        "1",
        "YES",
    ]


def test_bfloat16_only_when_it_is_asked_for(made: list[Any]):
    model, x = nn.Linear(64, 64).eval(), torch.randn(8, 64)
    function, _, _ = compiled(model, x, precision="bf16")
    # Processors without such instructions compute in float32 all the same.
    able = "BF16" in get_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    expected = "bfloat16" if able else "float32"
    assert properties(made[-1], "INFERENCE_PRECISION_HINT") == [f"<Type: '{expected}'>"]
    with torch.no_grad():
        torch.testing.assert_close(function(x), model(x), rtol=2e-2, atol=2e-2)


def test_inputs_are_read_where_they_are_and_each_call_has_results_of_its_own():
    x = torch.randn(4, 6)
    function, _, executable = compiled(mlp(), x)
    assert executable._activations[0].check(x).data_ptr() == x.data_ptr()
    checks.each_call_has_results_of_its_own(function, x)


def test_empty_tensors_and_scalars():
    (report,) = check(
        lambda x: (x * 2, x.sum(0), torch.cat([x, x + 1])),
        torch.randn(0, 4),
        backend="ov",
        ops_in_eager=None,
    )
    assert any("empty tensors" in f.reason for f in report.fallbacks)
    check(lambda x, y: (x * y + 1).sigmoid(), torch.tensor(2.0), torch.randn(3), backend="ov")


def test_weights_that_change_at_every_call_stop_being_prepared(made: list[Any]):
    model = mlp()
    function, _, executable = compiled(model, torch.randn(4, 6))
    checks.weights_that_change_stop_being_prepared(function, model, executable, made)


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True])
def test_memory_of_intermediate_results_is_given_back(
    dynamic: bool, monkeypatch: pytest.MonkeyPatch
):
    executables: list[Any] = []
    run = runtime.OpenVinoExecutable.bind

    def noting(self: Any, weights: Any) -> Any:
        executables.append(self)
        return run(self, weights)

    monkeypatch.setattr(runtime.OpenVinoExecutable, "bind", noting)
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Tanh(), nn.Conv2d(64, 1, 1)).eval()
    call = torch.compile(model, backend="ov", dynamic=dynamic, options={"cache": False})
    x = torch.randn(8, 3, 128, 128)
    for _ in range(2):
        call(x)
    return_free_memory()
    before = rss_bytes()
    executables[-1].release_memory()
    return_free_memory()
    assert before - rss_bytes() > 20 << 20
    for size in (8, 5) if dynamic else (8, 8):
        x = torch.randn(size, 3, 128, 128)
        torch.testing.assert_close(call(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_model_that_is_running_keeps_its_memory():
    class Busy:
        def release_memory(self) -> None:
            raise RuntimeError("busy")

    model, x = mlp(), torch.randn(4, 6)
    function, _, executable = compiled(model, x)
    busy = Busy()
    executable._running.add(busy)
    executable.release_memory()
    with torch.no_grad():
        torch.testing.assert_close(function(x), model(x), rtol=1e-4, atol=1e-5)


def test_results_are_the_callers():
    checks.results_are_the_callers("ov")


def test_threads_can_share_a_compiled_model():
    model = mlp()
    function, _, _ = compiled(model, torch.randn(4, 6))
    checks.threads_agree(function, model, 4, 6)


def test_a_forked_child_is_told(monkeypatch: pytest.MonkeyPatch):
    _, _, executable = compiled(nn.Sigmoid(), torch.randn(4))
    run, _ = executable.bind(())
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(ForkedProcessError, match=r"before os\.fork\(\)"):
        executable.bind(())
    monkeypatch.undo()
    assert run([torch.zeros(4)])[0].tolist() == [0.5] * 4


def test_one_executable_serves_all_batch_sizes():
    model = mlp()
    function = torch.compile(model, backend="ov", dynamic=True)
    with torch.no_grad(), dynamo_backends.record() as reports:
        for size in (2, 5, 3, 5):
            x = torch.randn(size, 6)
            torch.testing.assert_close(function(x), model(x))
    (report,) = reports
    assert report.executables == 1
    assert report.fallbacks == ()
    assert report.runtime_fallbacks == []


def test_outputs_that_are_inputs_are_found(made: list[Any]):
    function = torch.compile(
        lambda x, y: (y + 1, x * 1.0, y.clone()), backend="ov", options={"min_block_size": 1}
    )
    x, y = torch.randn(3), torch.randn(3)
    results = function(x, y)
    assert any(find_passthrough_outputs(model) for model in made)
    for result, expected in zip(results, (y + 1, x, y), strict=True):
        assert torch.equal(result, expected)


def test_the_processors_treatment_of_denormal_numbers_stays_as_it_is():
    tiny = torch.tensor([1e-40])
    compiled(mlp(), torch.randn(2, 6))
    assert (tiny * 0.5).item() > 0

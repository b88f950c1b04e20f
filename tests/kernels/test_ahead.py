"""Kernels that are compiled beside capture."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dynamo_backends import _torch_private as private
from dynamo_backends._torch_private import FakeTensorMode
from dynamo_backends.kernels import background_builds, skinny_gemm, small_channels, winograd
from dynamo_backends.kernels.native_code import once


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """Libraries that were begun by the test."""
    monkeypatch.setattr(background_builds, "_started", {})
    return background_builds._started


def weights(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.empty(shape) for shape in shapes]


FEW = small_channels._library, (False, torch.float32)
GROUPS = small_channels._library, (True, torch.float32)
WINOGRAD = winograd._library, ()
ROWS = skinny_gemm._library, ()


@pytest.mark.parametrize(
    ("shape", "library"),
    [
        ((64, 3, 7, 7), FEW),
        ((32, 4, 3, 3), GROUPS),
        ((64, 64, 3, 3), WINOGRAD),
        ((64, 48, 5, 5), WINOGRAD),
        ((64, 64, 1, 1), None),
        ((64, 1, 3, 3), None),
        ((1000, 2048), ROWS),
        ((10, 20), None),
        ((64,), None),
    ],
    ids=lambda given: "x".join(map(str, given)) if given and isinstance(given[0], int) else "",
)
def test_what_a_weight_needs(shape: tuple[int, ...], library: Any):
    assert list(background_builds.needed_kernels(weights(shape))) == ([library] if library else [])


def test_each_library_is_compiled_once_beside_the_caller(
    started: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
):
    begun, go_on = threading.Event(), threading.Event()
    threads: list[str] = []

    def compile_library() -> None:
        threads.append(threading.current_thread().name)
        begun.set()
        assert go_on.wait(60)

    monkeypatch.setattr(winograd, "_library", compile_library)
    background_builds.start(weights((64, 64, 3, 3), (128, 64, 3, 3)))
    assert begun.wait(60), "the caller goes on meanwhile"
    background_builds.start(weights((64, 64, 3, 3)))
    go_on.set()
    background_builds.finish()
    assert len(threads) == 1
    assert threads[0] != threading.current_thread().name
    assert len(started) == 1


def test_one_that_fails_is_left_to_who_needs_it(
    started: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
):
    def fail() -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(winograd, "_library", fail)
    background_builds.start(weights((64, 64, 3, 3)))
    background_builds.finish()
    assert list(started) == [(fail, ())]


def test_nothing_is_compiled_for_training_for_other_devices_and_for_symbols(
    started: dict[Any, Any],
):
    with torch.enable_grad():
        background_builds.start([nn.Parameter(torch.empty(64, 64, 3, 3))])
    background_builds.start([torch.empty(64, 64, 3, 3, device="meta"), 3])
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    with mode:
        symbol = environment.create_unbacked_symint()
        background_builds.start([torch.empty(64, symbol, 3, 3)])
    assert started == {}
    assert environment.guards == []


def test_a_compilation_begins_with_what_its_weights_need(monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []
    monkeypatch.setattr(
        background_builds, "start", lambda inputs: seen.extend(x.shape for x in inputs)
    )
    model = torch.compile(nn.Linear(3, 5).eval(), backend="inductor_freezing")
    with torch.no_grad():
        model(torch.randn(2, 3))
    assert (5, 3) in seen


def test_a_function_runs_once_whichever_threads_call_it():
    calls: list[int] = []
    meet = threading.Barrier(4)

    @once
    def double(number: int) -> int:
        calls.append(number)
        return 2 * number

    def call() -> None:
        meet.wait()
        assert double(3) == 6

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [3]
    double.cache_clear()
    assert double(3) == 6
    assert calls == [3, 3]


def test_a_compiler_is_asked_whether_it_knows_the_instructions(monkeypatch: pytest.MonkeyPatch):
    from torch._inductor import cpu_vec_isa

    from dynamo_backends._torch_private import inductor_compiler

    asked: list[str] = []

    def check(flags: str) -> bool:
        monkeypatch.setattr(cpu_vec_isa.VecISA, "build_arch_flags", lambda self: flags)
        asked.append(flags)
        return inductor_compiler._compiler_takes(cpu_vec_isa.VecISA(), "")

    assert check("-O2 -Wall")
    assert not check("-mno-such-instructions")
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: "no-compiler-here")
    assert not check("-O2")
    assert len(asked) == 3


def test_vectors_are_found_without_compiling(monkeypatch: pytest.MonkeyPatch):
    from torch._inductor import config, cpu_vec_isa

    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("torch computes with other vectors here")
    found: list[Any] = []
    seen = lambda: found.append(config.cpp.vec_isa_ok)  # noqa: E731
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", seen)
    private.preset_vector_isa()
    assert found == [True]
    assert config.cpp.vec_isa_ok is None, "as before"
    with config.patch({"cpp.vec_isa_ok": False}):
        private.preset_vector_isa()
    assert found == [True], "whoever sets it is heard"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    private.preset_vector_isa()
    assert found == [True], "torch has no such functions"

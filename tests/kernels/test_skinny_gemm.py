"""Linear layers on a few rows: the operator, and where Inductor's graphs call it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynamo_backends._torch_private import meets_benchmark_accuracy
from dynamo_backends.inductor import runtime
from dynamo_backends.kernels import skinny_gemm, winograd
from dynamo_backends.kernels.skinny_gemm import LINEAR
from tests.inductor.checking import EXACT, check
from tests.kernels.planted import always

MOST = skinny_gemm._library().most()


@pytest.mark.parametrize("rows", range(1, MOST + 1))
@pytest.mark.parametrize(("depth", "columns"), [(64, 8), (7, 5), (1, 1), (0, 3), (1999, 13)])
def test_the_operator_is_more_accurate_than_needed(rows: int, depth: int, columns: int):
    draw = torch.Generator().manual_seed(0)
    x, w, b = (
        torch.randn(s, generator=draw) for s in ((rows, depth), (columns, depth), (columns,))
    )
    for bias in (None, b):
        for relu in (False, True):
            expected, precise = (_linear(x, w, bias, relu, d) for d in (x.dtype, torch.float64))
            found = LINEAR(x, w, bias, relu)
            assert found.is_contiguous()
            assert meets_benchmark_accuracy(expected, found, precise, tol=1e-4)


def _linear(x: Tensor, w: Tensor, b: Tensor | None, relu: bool, dtype: torch.dtype) -> Tensor:
    result = F.linear(x.to(dtype), w.to(dtype), None if b is None else b.to(dtype))
    return result.relu() if relu else result


def test_nan_and_infinities_are_those_of_eager():
    x, w = torch.randn(4, 64), torch.randn(5, 64)
    x[1, 2], x[2, 3], w[3, 4] = float("nan"), float("inf"), float("-inf")
    for relu in (False, True):
        found, expected = LINEAR(x, w, None, relu), _linear(x, w, None, relu, torch.float32)
        torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Arguments of the calls that take a layer's place; the kernel always wins."""
    found: list[Any] = []
    use_skinny_gemm = runtime.use_skinny_gemm

    def spy(module: Any) -> None:
        use_skinny_gemm(module)
        nodes = module.graph.find_nodes(op="call_function", target=LINEAR)
        found.extend(node.args for node in nodes)

    monkeypatch.setattr(runtime, "use_skinny_gemm", spy)
    always(monkeypatch, "few rows")
    monkeypatch.setattr(skinny_gemm, "_LEAST", 1)
    return found


def test_a_classifier(calls: list[Any]):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 10, bias=False), nn.GELU())
    compiled = check(model, torch.randn(3, 40))
    assert [(args[2] is not None, args[3]) for args in calls] == [(True, True), (False, False)]
    with torch.no_grad():
        model[0].weight.mul_(2)
        x = torch.randn(3, 40)
        torch.testing.assert_close(compiled(x), model(x))


def test_rows_of_several_dimensions(calls: list[Any]):
    check(nn.Linear(16, 8), torch.randn(2, 3, 16))
    check(nn.Linear(16, 8), torch.randn(MOST, 2, 16)[:, 1], EXACT)
    assert len(calls) == 2


def test_what_stays(calls: list[Any], monkeypatch: pytest.MonkeyPatch):
    check(nn.Linear(16, 8), torch.randn(MOST + 1, 16))
    check(nn.Linear(16, 8).double(), torch.randn(2, 16).double())
    check(nn.Linear(16, 8), torch.randn(2, 16), {"freezing": "off"})
    monkeypatch.setattr(skinny_gemm, "_LEAST", 129)
    check(nn.Linear(16, 8), torch.randn(2, 16))
    assert calls == []


def test_nothing_changes_where_torch_is_to_be_deterministic(calls: list[Any]):
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        check(nn.Linear(16, 8), torch.randn(2, 16))
    finally:
        torch.use_deterministic_algorithms(before)
    assert calls == []


def test_a_kernel_that_cannot_be_compiled_is_told_and_not_used(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(source: str) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr("dynamo_backends._torch_private.load_cpp", refuse)
    libraries = (skinny_gemm._library, winograd._library)
    for library in libraries:
        library.cache_clear()
    try:
        model = nn.Sequential(nn.Conv2d(64, 64, 3), nn.Flatten(), nn.Linear(64, 8))
        check(model, torch.randn(2, 64, 3, 3))
    finally:
        for library in libraries:
            library.cache_clear()
    assert calls == []
    for name in ("skinny_gemm.cpp", "winograd.cpp"):
        text = f"compiling {name} failed; Inductor's kernels are used instead: RuntimeError: no"
        assert text in caplog.text


def test_the_choice_is_measured_against_libraries(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
):
    seen: list[Any] = []

    def fastest(kind: str, usual: str, make: Any, layouts: Any, preferred: str) -> str:
        ((shape, strides, dtype),) = layouts
        x = torch.empty_strided(shape, strides, dtype=dtype).normal_()
        results = {name: run([x])[0] for name, run in make().items()}
        for found in results.values():
            torch.testing.assert_close(found, results["torch"], rtol=1e-4, atol=1e-4)
        seen.append((kind, usual, preferred, sorted(results)))
        return usual

    monkeypatch.setattr(skinny_gemm, "fastest", fastest)
    check(nn.Linear(16, 8), torch.randn(2, 16))
    ways = ["few rows", "oneDNN", "torch"]
    assert seen == [("linear layer (8, 16)", "torch", "few rows", ways)]
    assert calls == []

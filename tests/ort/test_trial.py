"""What ONNX Runtime is not given, and why."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import dynamo_backends
from dynamo_backends import Support
from dynamo_backends.onnx import exporter_lowerings
from dynamo_backends.ort import trial
from dynamo_backends.runtime.verdicts import VerdictStore
from tests.checking import check

aten = torch.ops.aten


def reasons(fn: Any, *inputs: Tensor) -> dict[str, str]:
    """Why operators of a function run in eager; its result is checked."""
    reports = check(fn, *inputs, ops_in_eager=None, backend="onnxrt", min_block_size=1, cache=False)
    return {f.op: f.reason for r in reports for f in r.fallbacks}


def test_a_missing_kernel_is_a_reason():
    x = torch.randn(4, dtype=torch.bfloat16)
    found = reasons(lambda x: x.rsqrt(), x.abs() + 1)
    assert "Could not find an implementation" in found["aten.rsqrt.default"]


def test_norms_are_right_in_trials():
    """Of samples whose squares overflow eager has no result; large weights cancel."""
    weight, bias = torch.randn(8), torch.randn(8)
    x = torch.randn(4, 6, 8)
    assert reasons(lambda *args: nn.functional.layer_norm(args[0], (8,), *args[1:]),
                   x, weight, bias) == {}  # fmt: skip
    norm = nn.BatchNorm2d(512).train()
    assert reasons(norm, torch.randn(4, 512, 2, 2)) == {}


def test_an_operator_without_lowering_is_a_reason():
    found = reasons(lambda x: torch.special.bessel_j0(x) + 1, torch.randn(4))
    assert found == {"aten.special_bessel_j0.default": "onnxscript has no lowering of it"}


def test_lowerings_that_cancel_are_not_used():
    x = torch.tensor([1e-9, 6.0], dtype=torch.float64)  # there are formulas for float32
    found = reasons(lambda x: (x.log1p(), x.expm1(), x.erfc()), x)
    assert set(found) == {"aten.log1p.default", "aten.expm1.default", "aten.erfc.default"}
    assert "loses all precision" in found["aten.log1p.default"]


def test_infinities_are_found_among_what_is_scattered():
    def fn(x: Tensor, index: Tensor, source: Tensor) -> Tensor:
        return x.scatter_reduce(0, index, source, "amin", include_self=False)

    index, source = torch.tensor([1, 1, 3, 3]), torch.tensor([float("inf"), float("inf"), 2.0, 1.0])
    found = reasons(fn, torch.zeros(4), index, source)
    assert "hides infinities" in found["aten.scatter_reduce.two"]


def test_images_of_integers_are_interpolated_by_eager():
    x = torch.randint(0, 256, (6, 3, 10, 20), dtype=torch.uint8)
    found = reasons(
        lambda x: torch.nn.functional.interpolate(x, (3, 3), mode="bilinear", antialias=True), x
    )
    assert "fixed-point" in found["aten._upsample_bilinear2d_aa.default"]


def test_complex_numbers_stay_in_eager():
    found = reasons(lambda x: x * 2, torch.randn(3, dtype=torch.complex64))
    assert found == {"aten.mul.Tensor": "ONNX Runtime does not compute with torch.complex64"}


def test_sizes_that_depend_on_data_stay_in_eager():
    def fn(x: Tensor) -> Tensor:
        return torch.nonzero(x > 0).sum() + x.sum().long()

    with torch.no_grad():
        x = torch.randn(8)
        assert torch.equal(torch.compile(fn, backend="onnxrt")(x), fn(x))


@pytest.mark.parametrize(
    ("fn", "values"),
    [
        (torch.round, [0.5, 1.5, 2.5, -0.5, -1.5]),
        (lambda x: torch.remainder(x, 3), [-7.0, 7.0, -3.0]),
        (lambda x: torch.fmod(x, 3), [-7.0, 7.0, -3.0]),
        (lambda x: torch.floor_divide(x, 2), [-7.0, 7.0]),
        (lambda x: x.to(torch.int32), [-1.9, 1.9, 2.0**30]),
        (lambda x: x.to(torch.bool), [0.0, 0.3, float("nan")]),
        (lambda x: x.amax(0), [1.0, float("nan"), 3.0]),
        (lambda x: x.argmax(0), [1.0, float("nan"), 3.0]),
        (lambda x: x.max(0).indices, [1.0, float("nan"), 3.0]),
        (lambda x: torch.maximum(x, x.flip(0)), [1.0, float("nan"), 3.0]),
        (torch.sign, [float("nan"), -2.0, 0.0]),
        (lambda x: x.clamp(-1, 1), [float("nan"), 5.0]),
        (torch.relu, [float("nan"), -1.0, float("inf")]),
    ],
)
def test_meanings_that_differ_between_onnx_and_torch(fn: Any, values: list[float]):
    reasons(fn, torch.tensor(values))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8])
def test_integer_arithmetic(dtype: torch.dtype):
    x = torch.tensor([7, -7, 100, 3]).to(dtype)
    y = torch.tensor([2, 2, 7, -2 if dtype.is_signed else 2]).to(dtype)

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        floor = torch.div(x, y, rounding_mode="floor")
        return floor, torch.div(x, y, rounding_mode="trunc"), x % y, x * x, x // y, x / y

    reasons(fn, x, y)


@pytest.mark.parametrize("op", ["minimum", "maximum"])
def test_integers_whose_lower_half_is_negative(op: str):
    x = torch.tensor([2**31 + 5, 4, 2**40 + 1, -8] * 10)
    assert reasons(getattr(torch, op), x, x.roll(1)) == {}


def test_diagonals_beside_nan():
    found = reasons(torch.diagonal_copy, torch.tensor([[1.0, float("nan")], [3.0, 4.0]]))
    assert "aten.diagonal_copy.default" in found


def test_large_calls_that_split_their_rows():
    found = reasons(lambda x: [t * 2 for t in x.unbind(0)], torch.randn(3, 400_000))
    assert found == {}


def test_float64_keeps_its_digits():
    x = torch.tensor([1 + 2.0**-40], dtype=torch.float64)
    compiled = torch.compile(lambda x: (x + 0.1) * 0.1 - 0.1, backend="onnxrt")
    assert abs(compiled(x).item() - ((x + 0.1) * 0.1 - 0.1).item()) < 1e-15


def test_a_wrong_lowering_is_noticed(monkeypatch: pytest.MonkeyPatch):
    (meta,) = exporter_lowerings.exporter_registry().get_decomps(aten.cos.default)
    (other,) = exporter_lowerings.exporter_registry().get_decomps(aten.sin.default)
    monkeypatch.setattr(meta, "onnx_function", other.onnx_function)
    monkeypatch.setattr(trial, "_verdicts", VerdictStore("onnxrt", (), shipped=False))
    monkeypatch.setattr(trial, "has_decomposition", lambda op: False)
    found = reasons(lambda x: x.cos(), torch.randn(30))
    assert "in a trial ONNX Runtime's output 0 " in found["aten.cos.default"]


def test_what_has_no_lowering_is_taken_apart():
    node = _node(aten.hardswish_backward.default, torch.randn(8), torch.randn(8))
    backend: Any = dynamo_backends.get_backend("onnxrt")
    assert not exporter_lowerings.has_exporter_lowering(aten.hardswish_backward.default)
    assert backend.supports(node, backend.Options()) == Support(True, decomposed=True)
    x = torch.randn(40, requires_grad=True)
    y = torch.compile(torch.nn.functional.hardswish, backend="onnxrt")(x)
    (ours,) = torch.autograd.grad(y.sum(), x)
    (theirs,) = torch.autograd.grad(torch.nn.functional.hardswish(x).sum(), x)
    torch.testing.assert_close(ours, theirs)


def test_a_step_is_given_calls_that_are_decomposed():
    def losses(compiled: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Hardswish(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        function: Any = step
        if compiled:
            function = dynamo_backends.compile_step(
                step, model=model, optimizer=optimizer, backend="onnxrt"
            )
        return [function(torch.ones(4, 6)).item() for _ in range(3)]

    assert losses(compiled=True) == pytest.approx(losses(compiled=False), rel=1e-5)


def _node(op: Any, *inputs: Tensor) -> fx.Node:
    graph = fx.Graph()
    places = []
    for i, x in enumerate(inputs):
        places.append(graph.placeholder(f"x{i}"))
        places[-1].meta["val"] = x
    node = graph.call_function(op, tuple(places))
    node.meta["val"] = op(*inputs)
    graph.output((node,))
    return node

"""The vendors' own quantizers: what they make is used, watched, and refused where it is wrong."""

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends import GraphReport

TORCHAO = "inductor_freezing"
KINDS = (
    ("onnxrt", "int8"),
    ("onnxrt", "int8-dynamic"),
    ("ov", "int8"),
    ("ov", "int8-weights"),
    (TORCHAO, "int8-dynamic"),
    (TORCHAO, "int8-weights"),
)

# Of torchao and NNCF about themselves, and what torch says of how they use it.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def needs_package(backend: str) -> None:
    package = {"ov": "nncf", TORCHAO: "torchao"}.get(backend)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'dynamo-backends[int8]'")


class Mixed(nn.Module):
    """Layers of a transformer's kind, and one that reads an unusual layout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.norm = nn.LayerNorm(64)
        self.second = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.nn.functional.gelu(self.norm(self.first(x.mT.contiguous().mT))))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2), nn.ReLU()
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


def rows() -> Tensor:
    return torch.randn(4, 8, 32)


def images() -> Tensor:
    return torch.rand(4, 3, 16, 16)


def compiled(
    model: nn.Module, make: Callable[[], Tensor], backend: str, **options: Any
) -> tuple[Callable[[Tensor], Tensor], GraphReport]:
    """A compiled model that was called once, and the report of its graph."""
    given = {"calibration": [make() for _ in range(4)], "tolerance": {"cosine": 0.99}, **options}
    run = torch.compile(model, backend=backend, options=given)
    with torch.no_grad(), dynamo_backends.record() as reports:
        run(make())
    (report,) = reports
    return run, report


@pytest.mark.parametrize(("backend", "precision"), KINDS)
def test_linear_layers_in_int8(backend: str, precision: str):
    needs_package(backend)
    model = Mixed().eval()
    run, report = compiled(model, rows, backend, precision=precision)
    assert (report.events, report.fallbacks, report.reverted) == ([], (), "")
    assert 0.99 < report.measured["cosine"] < 1
    assert report.precision == precision
    with torch.no_grad():
        for _ in range(2):
            x = rows()
            expected, result = model(x), run(x)
            assert not torch.allclose(expected, result, 1e-4, 1e-4), "it is not in int8"
            torch.testing.assert_close(result, expected, rtol=0.1, atol=0.3)


@pytest.mark.parametrize("backend", ["onnxrt", "ov"])
def test_convolutions_in_int8(backend: str):
    needs_package(backend)
    model = Images().eval()
    run, report = compiled(model, images, backend, precision="int8")
    assert (report.events, report.fallbacks, report.reverted) == ([], (), "")
    with torch.no_grad():
        x = images()
        expected, result = model(x), run(x)
    assert not torch.allclose(expected, result, 1e-4, 1e-4), "it is not in int8"
    torch.testing.assert_close(result, expected, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("backend", ["onnxrt", "ov"])
def test_the_first_products_stay_in_float(backend: str, monkeypatch: pytest.MonkeyPatch):
    """Two convolutions of three products."""
    needs_package(backend)
    module = importlib.import_module(
        f"dynamo_backends.{'ort' if backend == 'onnxrt' else 'openvino'}.quantized"
    )
    original, made = module.quantize_model, []
    monkeypatch.setattr(
        module, "quantize_model", lambda *args: made.append(original(*args)) or made[-1]
    )
    monkeypatch.setattr("dynamo_backends.int8.proven.IN_FLOAT", (0.4,))
    _, report = compiled(Images().eval(), images, backend, precision="int8")
    assert (report.events, report.in_float) == ([], 0.4)
    (model,) = made
    quantized = in_onnx(model) if backend == "onnxrt" else in_openvino(model)
    assert quantized == [False, False, True]


def in_onnx(text: bytes) -> list[bool]:
    """Of each product, whether an input of it is quantized."""
    graph = onnx.load_model_from_string(text).graph
    made = {name: node.op_type for node in graph.node for name in node.output}
    products = [node for node in graph.node if node.op_type in ("Conv", "Gemm", "MatMul")]
    return [any("Dequantize" in made.get(name, "") for name in p.input) for p in products]


def in_openvino(model: Any) -> list[bool]:
    """The same."""
    kinds = ("Convolution", "MatMul")
    products = [op for op in model.get_ordered_ops() if op.get_type_name() in kinds]
    return [
        any(x.get_node().get_type_name() == "FakeQuantize" for x in product.input_values())
        for product in products
    ]


@pytest.mark.parametrize(("backend", "precision"), KINDS)
def test_weights_that_change_are_quantized_and_proven_anew(backend: str, precision: str):
    needs_package(backend)
    model = Mixed().eval()
    run, report = compiled(model, rows, backend, precision=precision)
    before = report.verified
    with torch.no_grad():
        x = rows()
        model.second.weight.mul_(-2)
        torch.testing.assert_close(run(x), model(x), msg="the first call runs in eager")
        assert report.rebinds == 1
        assert report.verified == before + 1
        expected, result = model(x), run(x)
    assert not torch.allclose(expected, result, 1e-4, 1e-4), "it is not in int8"
    torch.testing.assert_close(result, expected, rtol=0.1, atol=0.6)
    assert report.events == []


def test_weights_that_keep_changing_are_computed_with_in_eager():
    model = Mixed().eval()
    run, report = compiled(model, rows, "onnxrt", precision="int8-dynamic")
    with torch.no_grad():
        for _ in range(8):
            x = rows()
            model.second.weight.mul_(1.1)
            torch.testing.assert_close(run(x), model(x))
    assert report.rebinds >= 4
    assert report.verified < 8, "nothing is quantized that serves no call"


@pytest.mark.parametrize(("backend", "precision"), [("onnxrt", "int8"), (TORCHAO, "int8-weights")])
def test_it_is_quantized_in_inference_mode_and_serves_in_others(backend: str, precision: str):
    needs_package(backend)
    model = Mixed().eval()
    with torch.inference_mode():
        run, report = compiled(model, rows, backend, precision=precision)
        assert report.events == []
        inside = run(rows())
        assert inside.is_inference()
        model.second.weight.mul_(-2)
        for _ in range(2):  # in eager, and quantized anew
            x = rows()
            torch.testing.assert_close(run(x), model(x), rtol=0.1, atol=0.6)
        assert (report.rebinds, report.events) == (1, [])
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x), rtol=0.1, atol=0.6)


def spoilt(what: str) -> Callable[..., bytes]:
    """A quantizer of ONNX Runtime's whose scales, or zero points of activations, are wrong."""
    from dynamo_backends.ort import quantized as module

    original = module.quantize_model

    def quantize(*args: Any) -> bytes:
        model = onnx.load_model_from_string(original(*args))
        found = 0
        for tensor in model.graph.initializer:
            values = numpy_helper.to_array(tensor)
            if what == "scale" and tensor.name.endswith("_scale") and not values.shape:
                changed = values * np.float32(0.3)
            elif (
                what == "zero point"
                and tensor.data_type == onnx.TensorProto.UINT8
                and not values.shape
            ):
                changed = (values // 3).astype(np.uint8)
            else:
                continue
            tensor.CopyFrom(numpy_helper.from_array(np.asarray(changed), tensor.name))
            found += 1
        assert found, "nothing was spoilt"
        return model.SerializeToString()

    return quantize


@pytest.mark.parametrize("precision", ["int8", "int8-dynamic"])
@pytest.mark.parametrize(("saturates", "bits"), [(True, 7), (False, 8)])
def test_weights_have_seven_bits_where_sums_saturate(
    precision: str, saturates: bool, bits: int, monkeypatch: pytest.MonkeyPatch
):
    from dynamo_backends.ort import quantized as module

    original, found = module.quantize_model, []

    def kept(*args: Any) -> bytes:
        made = original(*args)
        found.extend(
            int(np.abs(numpy_helper.to_array(tensor).astype(np.int32)).max())
            for tensor in onnx.load_model_from_string(made).graph.initializer
            if tensor.data_type == onnx.TensorProto.INT8 and len(tensor.dims) == 2
        )
        return made

    monkeypatch.setattr(module, "quantize_model", kept)
    monkeypatch.setattr(module, "saturates", lambda: saturates)
    compiled(Mixed().eval(), rows, "onnxrt", precision=precision)
    assert len(found) == 2
    assert all(2 ** (bits - 2) < most <= 2 ** (bits - 1) for most in found)


@pytest.mark.plants_errors
@pytest.mark.parametrize("what", ["scale", "zero point"])
def test_a_wrong_model_runs_in_eager(what: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dynamo_backends.ort.quantized.quantize_model", spoilt(what))
    model = Mixed().eval()
    run, report = compiled(model, rows, "onnxrt", precision="int8")
    assert [event.kind for event in report.events] == ["wrong"]
    with torch.no_grad():
        x = rows()
        assert torch.equal(run(x), model(x))


@pytest.mark.parametrize("what", ["scale", "zero point"])
def test_autotune_does_not_choose_it(what: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dynamo_backends.ort.quantized.quantize_model", spoilt(what))
    options = {"precision": "int8", "candidates": ["onnxrt"]}
    _, report = compiled(Mixed().eval(), rows, "autotune", **options)
    found = {row.name: row for row in report.candidates}
    assert found["onnxrt@int8"].reason.startswith("wrong: ")
    assert found["onnxrt@int8"].measured["cosine"] < 1
    assert found["onnxrt"].error < 1e-5
    assert report.chosen in ("eager", "onnxrt", "onnxrt@int8-dynamic")


@pytest.mark.plants_errors
def test_what_is_wrong_only_for_new_weights_runs_in_eager(monkeypatch: pytest.MonkeyPatch):
    model = Mixed().eval()
    run, report = compiled(model, rows, "onnxrt", precision="int8")
    assert report.events == []
    monkeypatch.setattr("dynamo_backends.ort.quantized.quantize_model", spoilt("scale"))
    with torch.no_grad():
        model.second.weight.mul_(-2)
        for _ in range(3):
            x = rows()
            torch.testing.assert_close(run(x), model(x))
    (event,) = report.events
    assert event.kind == "wrong"
    assert event.reason.endswith("after weights were changed")


def test_explain_shows_what_is_admitted_and_measured():
    model, given = Mixed().eval(), [rows() for _ in range(4)]
    options = {"precision": "int8", "tolerance": {"cosine": 0.99, "relative": 0.2},
               "calibration": given, "candidates": ["onnxrt"]}  # fmt: skip
    with torch.no_grad():
        found = dynamo_backends.explain(model, rows(), backend="autotune", options=options)
    text = str(found)
    assert "tolerance cosine at least 0.99, relative at most 0.2" in text
    assert "held-out" in text
    table = text[text.index("held-out", text.index("candidate")) :]
    assert all(name in table for name in ("onnxrt@int8", "cosine 0.99", "relative 0.0"))


def test_quantizing_leaves_logging_alone():
    import logging

    root = logging.getLogger()
    before = list(root.handlers), root.level
    compiled(Mixed().eval(), rows, "onnxrt", precision="int8")
    assert (list(root.handlers), root.level) == before


def test_autotune_tries_torchao_within_a_capture() -> None:
    """Sizes of inputs were symbols of the capture there, which no guard could be written for."""
    needs_package(TORCHAO)
    model = Images().eval()
    given = {"calibration": [images() for _ in range(4)], "tolerance": {"cosine": 0.9}}
    given |= {"precision": "int8", "candidates": (TORCHAO,), "isolate": "off"}
    run = torch.compile(model, backend="autotune", options=given)
    with torch.no_grad(), dynamo_backends.record() as reports:
        x = images()
        torch.testing.assert_close(run(x), model(x), rtol=0.1, atol=0.3)
    found = {c.name: c for report in reports for c in report.candidates}
    assert found[f"{TORCHAO}@int8-dynamic"].compile_s is not None

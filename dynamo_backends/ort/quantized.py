"""Blocks in int8 by ONNX Runtime's own quantizer (`onnxruntime.quantization`).

The model with its weights is written to a folder, for that quantizer works on files; scales of
activations come from batches ("int8") or from each call ("int8-dynamic").
"""

import contextlib
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.tensor_adapters import TorchTensor
from torch import Tensor

from dynamo_backends.graph.graph import Graph
from dynamo_backends.int8.executable import Activations, QuantizedExecutable, left_in_float
from dynamo_backends.int8.options import DYNAMIC, saturates
from dynamo_backends.interface.errors import CompileError, reraise_as_compile_error
from dynamo_backends.interface.executable import Bound
from dynamo_backends.onnx.lowering import lower_to_onnx
from dynamo_backends.ort.runtime import ModelNames, OrtExecutable
from dynamo_backends.ort.session import SessionSettings, plain_message

_PRODUCTS = ["MatMul", "Gemm"]
_IMAGES = ["Conv", "Relu", "Clip", "Add", "MaxPool", "AveragePool", "GlobalAveragePool", "Concat"]
"""What lies between convolutions is quantized with them, or each would have float32 around it."""

_MULTIPLY = frozenset({*_PRODUCTS, "Conv"})

_QUANTIZED = frozenset({"DequantizeLinear", "MatMulInteger", "DynamicQuantizeMatMul"})
_LARGEST = 2_000_000_000  # bytes of a protobuf


class OrtInt8Executable(QuantizedExecutable):
    """An executable whose sessions run a model that was quantized to int8.

    Args:
        graph: With static shapes, on the CPU.
        settings: Settings of its sessions.
        precision: "int8" or "int8-dynamic".
    """

    def __init__(self, graph: Graph, settings: SessionSettings, precision: str):
        super().__init__(graph)
        self._precision = precision
        lowered = lower_to_onnx(graph)
        names = ModelNames(lowered.inputs, lowered.outputs)
        model = ir.to_proto(lowered.model).SerializeToString()
        with reraise_as_compile_error("ONNX Runtime cannot load the model", plain_message):
            self._float = _Float(graph, model, names, settings)

    def prepare(self, weights: Sequence[Tensor], seen: Activations, in_float: float) -> Bound:
        """See `QuantizedExecutable.prepare`."""
        model = self._float.with_weights(weights)
        batches = [self._float.named(activations) for activations in seen]
        with reraise_as_compile_error("ONNX Runtime's quantizer failed", plain_message):
            return self._float.run_model(quantize_model(model, batches, self._precision, in_float))


class _Float(OrtExecutable):
    """The block in float32: what is quantized, and how models are run."""

    def run_model(self, model: bytes) -> Bound:
        """Returns what runs another model of the same inputs and outputs, which has its weights."""
        return self._run(self._session(model, {}))

    def with_weights(self, weights: Sequence[Tensor]) -> onnx.ModelProto:
        """Returns the model with its weights inside; raises if they exceed protobuf's limit."""
        model = ir.from_proto(onnx.load_model_from_string(self.model))
        tensors = self.model_weights(weights)
        size = sum(t.nbytes for t in tensors.values())
        if size > _LARGEST:
            raise CompileError(
                f"ONNX models are limited to {_LARGEST} bytes, but the weights have {size} bytes"
            )
        for name, tensor in tensors.items():
            model.graph.initializers[name].const_value = TorchTensor(tensor.cpu(), name=name)
        return ir.to_proto(model)

    def named(self, activations: Sequence[Tensor]) -> dict[str, Any]:
        """Activations by the names of the model's inputs, in the order of memory."""
        return {
            x.name: x.check.to_program_order(activations[x.place]).contiguous().numpy()
            for x in self._inputs
        }


def quantize_model(
    model: onnx.ModelProto,
    batches: Sequence[Mapping[str, Any]],
    precision: str,
    in_float: float = 0.0,
) -> bytes:
    """Quantizes an ONNX model to int8; returns it serialized.

    Args:
        model: With its weights.
        batches: Inputs by name, which calibrate.
        precision: "int8" or "int8-dynamic".
        in_float: The part of its products, from the first one on, that stay in float32, with all
            that is computed before the next one.

    Raises:
        CompileError: Nothing in it can be quantized.
    """
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    common = {"weight_type": QuantType.QInt8, "per_channel": True, "reduce_range": saturates()}
    constant = {"MatMulConstBOnly": True}  # products of two activations stay in float32
    with tempfile.TemporaryDirectory(prefix="dynamo-backends-") as folder, _quiet():
        whole, source, target = (Path(folder) / f"{n}.onnx" for n in ("whole", "float", "int8"))
        onnx.save(model, whole)
        quant_pre_process(whole, source, skip_symbolic_shape=True)
        _forget_shapes_of_weights(source)
        if precision == DYNAMIC:
            quantize_dynamic(
                source, target, op_types_to_quantize=_PRODUCTS, extra_options=constant, **common
            )
        else:
            quantize_static(
                source,
                target,
                _reader(batches),
                quant_format=QuantFormat.QDQ,
                activation_type=QuantType.QUInt8,
                op_types_to_quantize=_operators(model),
                nodes_to_exclude=_first(onnx.load(source), in_float),
                extra_options=constant,
                **common,
            )
        found = onnx.load(target)
    if not any(node.op_type in _QUANTIZED for node in found.graph.node):
        raise CompileError(
            "the graph has no linear layer or convolution with constant weights to quantize"
        )
    return found.SerializeToString()


def _first(model: onnx.ModelProto, part: float) -> list[str]:
    """Names of the nodes before the first product that is quantized."""
    nodes = model.graph.node
    products = [i for i, node in enumerate(nodes) if node.op_type in _MULTIPLY]
    left = left_in_float(part, len(products))
    return [node.name for node in nodes[: products[left]]] if left else []


def _forget_shapes_of_weights(path: Path) -> None:
    """Removes the weights' shapes: the quantizer transposes weights and would object."""
    model = onnx.load(path)
    weights = {tensor.name for tensor in model.graph.initializer}
    kept = [value for value in model.graph.value_info if value.name not in weights]
    del model.graph.value_info[:]
    model.graph.value_info.extend(kept)
    onnx.save(model, path)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences the root logger, which the quantizer uses (context manager)."""
    root, handler = logging.getLogger(), logging.NullHandler()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        root.setLevel(level)
        root.removeHandler(handler)


def _operators(model: onnx.ModelProto) -> list[str]:
    has_images = any(node.op_type == "Conv" for node in model.graph.node)
    return [*_PRODUCTS, *_IMAGES] if has_images else _PRODUCTS


def _reader(batches: Sequence[Mapping[str, Any]]) -> Any:
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):
        """Batches, one after the other."""

        def __init__(self) -> None:
            self._left: Iterator[Mapping[str, Any]] = iter(batches)

        def get_next(self) -> Mapping[str, Any] | None:
            """The next batch; None: there is none."""
            return next(self._left, None)

    return Reader()

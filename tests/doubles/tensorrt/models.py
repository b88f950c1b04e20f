"""ONNX models as the double's engines run them: with ONNX Runtime, on the CPU."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import GraphProto, ModelProto, TensorProto, helper, shape_inference

from tests.doubles.tensorrt.enums import DataType

_TYPES = {
    TensorProto.FLOAT: (DataType.FLOAT, 4),
    TensorProto.FLOAT16: (DataType.HALF, 2),
    TensorProto.BFLOAT16: (DataType.BF16, 2),
    TensorProto.INT32: (DataType.INT32, 4),
    TensorProto.INT64: (DataType.INT64, 8),
    TensorProto.BOOL: (DataType.BOOL, 1),
}
_NUMPY = {DataType.FLOAT: np.float32, DataType.HALF: np.float16, DataType.INT32: np.int32,
          DataType.INT64: np.int64, DataType.BOOL: np.bool_, DataType.BF16: np.uint16}  # fmt: skip


def data_type(element_type: int) -> DataType | None:
    """The vendor's name of ONNX's element type."""
    return _TYPES[element_type][0] if element_type in _TYPES else None


def item_size(kind: DataType) -> int:
    """Bytes of an element."""
    return next(size for name, size in _TYPES.values() if name == kind)


def external(graph: GraphProto) -> dict[str, TensorProto]:
    """The initializers whose data is elsewhere, by name."""
    return {t.name: t for t in graph.initializer if t.data_location == TensorProto.EXTERNAL}


def constants(graph: GraphProto) -> dict[str, tuple[DataType, int, bytes]]:
    """Floating-point constants, which can be given anew as weights can: type, count, data."""
    found = {t.name: t for t in graph.initializer if t.data_location != TensorProto.EXTERNAL}
    for node in graph.node:
        if node.op_type == "Constant":
            value = onnx.helper.get_attribute_value(node.attribute[0])
            if isinstance(value, float) or (
                isinstance(value, list) and value and isinstance(value[0], float)
            ):
                value = onnx.numpy_helper.from_array(np.array(value, dtype=np.float32))
            if isinstance(value, TensorProto):
                found[node.output[0]] = value
    floats = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
    arrays = {n: onnx.numpy_helper.to_array(t) for n, t in found.items() if t.data_type in floats}
    return {
        name: (_TYPES[found[name].data_type][0], array.size, array.tobytes())
        for name, array in arrays.items()
    }


def types_of(model: ModelProto) -> dict[str, int]:
    """Element types of all values, as far as ONNX infers them."""
    inferred = shape_inference.infer_shapes(model).graph
    found = {t.name: t.data_type for t in inferred.initializer}
    for value in (*inferred.input, *inferred.output, *inferred.value_info):
        found[value.name] = value.type.tensor_type.elem_type
    return found


def ranks_of(model: ModelProto) -> dict[str, int]:
    """Numbers of dimensions of all values, as far as ONNX infers them."""
    inferred = shape_inference.infer_shapes(model).graph
    found = {t.name: len(t.dims) for t in inferred.initializer}
    for value in (*inferred.input, *inferred.output, *inferred.value_info):
        if value.type.tensor_type.HasField("shape"):
            found[value.name] = len(value.type.tensor_type.shape.dim)
    return found


def shape_of(value: Any) -> tuple[int, ...]:
    """The declared shape of an input or output; -1 for what varies."""
    dims = value.type.tensor_type.shape.dim
    return tuple(d.dim_value if d.HasField("dim_value") else -1 for d in dims)


def session(model: ModelProto, weights: Mapping[str, bytes]) -> onnxruntime.InferenceSession:
    """What executes a model with these weights. Bfloat16 is computed in float32 and rounded."""
    copy = ModelProto()
    copy.CopyFrom(model)
    fill(copy, weights)
    if any(t == TensorProto.BFLOAT16 for t in types_of(copy).values()):
        _without_bfloat16(copy.graph, types_of(copy))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(
        copy.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def fill(model: ModelProto, weights: Mapping[str, bytes]) -> None:
    """Puts the data of weights into a model."""
    for tensor in model.graph.initializer:
        if tensor.name in weights:
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
            tensor.raw_data = weights[tensor.name]


def to_numpy(data: np.ndarray, kind: DataType, shape: tuple[int, ...]) -> np.ndarray:
    """Bytes as the session reads them."""
    array = data.view(_NUMPY[kind]).reshape(shape)
    if kind == DataType.BF16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array


def to_bytes(array: np.ndarray, kind: DataType) -> np.ndarray:
    """The reverse of `to_numpy`."""
    if kind == DataType.BF16:
        array = (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    assert array.dtype == _NUMPY[kind], (array.dtype, kind)
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), dtype=np.uint8)


def _without_bfloat16(graph: GraphProto, types: Mapping[str, int]) -> None:
    """Float32 in the place of bfloat16, every result rounded."""
    del graph.value_info[:]
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == TensorProto.BFLOAT16:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.BFLOAT16:
            _widen(tensor)
    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        graph.node.append(node)
        for attribute in graph.node[-1].attribute:
            if attribute.name == "to" and attribute.i == TensorProto.BFLOAT16:
                attribute.i = TensorProto.FLOAT
            elif attribute.name == "value" and attribute.t.data_type == TensorProto.BFLOAT16:
                _widen(attribute.t)
        for i, name in enumerate(node.output):
            if types.get(name) == TensorProto.BFLOAT16:
                graph.node[-1].output[i] = f"{name}__exact"
                _round(graph, f"{name}__exact", name)


def _round(graph: GraphProto, source: str, name: str) -> None:
    graph.node.append(
        helper.make_node("Cast", [source], [f"{name}__bf16"], to=TensorProto.BFLOAT16)
    )
    graph.node.append(helper.make_node("Cast", [f"{name}__bf16"], [name], to=TensorProto.FLOAT))


def _widen(tensor: TensorProto) -> None:
    shape = tuple(tensor.dims)
    raw = np.frombuffer(onnx.numpy_helper.to_array(tensor).tobytes(), dtype=np.uint16)
    wide = (raw.astype(np.uint32) << 16).view(np.float32).reshape(shape)
    tensor.CopyFrom(onnx.numpy_helper.from_array(wide, tensor.name))

"""The constants inside a model, which a plan without weights does not hold either."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, NodeProto, TensorProto, numpy_helper

from dynamo_backends.trt import vendor

_TYPES: dict[int, str] = {
    TensorProto.FLOAT: "FLOAT",
    TensorProto.FLOAT16: "HALF",
    TensorProto.BFLOAT16: "BF16",
    TensorProto.INT32: "INT32",
    TensorProto.INT64: "INT64",
    TensorProto.BOOL: "BOOL",
}


@dataclass(frozen=True)
class Constant:
    """Data of a constant.

    Attributes:
        data: Its bytes.
        element_type: As ONNX has it.
        count: Number of elements.
    """

    data: np.ndarray[Any, Any]
    element_type: int
    count: int

    def weights(self) -> Any:
        """As TensorRT takes it; the data must be alive as long as that is used."""
        trt = vendor.tensorrt()
        kind = getattr(trt.DataType, _TYPES[self.element_type])
        return trt.Weights(kind, self.data.ctypes.data, self.count)


def constants_of(model: bytes) -> Mapping[str, Constant]:
    """The constants of a model by the names that TensorRT's parser gives them."""
    graph = onnx.load_model_from_string(model).graph
    tensors = {t.name: t for t in graph.initializer if t.data_location != TensorProto.EXTERNAL}
    for node in graph.node:
        if node.op_type == "Constant":
            tensors[node.output[0]] = _value(node)
    return {
        name: _constant(tensor) for name, tensor in tensors.items() if tensor.data_type in _TYPES
    }


def _constant(tensor: TensorProto) -> Constant:
    array = np.ascontiguousarray(numpy_helper.to_array(tensor))
    return Constant(array, tensor.data_type, array.size)


def _value(node: NodeProto) -> TensorProto:
    (attribute,) = node.attribute
    if attribute.type == AttributeProto.TENSOR:
        return attribute.t
    integers = attribute.type in (AttributeProto.INT, AttributeProto.INTS)
    value = onnx.helper.get_attribute_value(attribute)
    return numpy_helper.from_array(np.array(value, dtype=np.int64 if integers else np.float32))

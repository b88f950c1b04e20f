"""What lowerings ask and make of operations of OpenVINO's models."""

import math
from typing import Any

from dynamo_backends.openvino.vendor import Type, ops

Output = Any

FLOATS = (Type.f16, Type.bf16, Type.f32, Type.f64)


def element_type(source: Output) -> Type:
    """Reads the element type of an operation's output."""
    kind: Type = source.get_element_type()
    return kind


def inputs_of(node: Any) -> list[Any]:
    """Lists the outputs that an operation reads."""
    return [node.input_value(i) for i in range(node.get_input_size())]


def number(value: float, like: Output) -> Any:
    """Makes a constant of the element type of an output."""
    if math.isinf(value) and element_type(like) == Type.bf16:  # whose constants OpenVINO checks
        return ops.convert(ops.constant(value, Type.f32), Type.bf16)
    return ops.constant(value, element_type(like))


def is_constant(source: Output) -> bool:
    """Tells whether an output is a constant."""
    return bool(source.get_node().get_type_name() == "Constant")

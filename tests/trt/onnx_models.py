"""ONNX models that no graph of torch's lowers to."""

import math

import torch
from onnx import TensorProto, helper

from dynamo_backends.trt.engine_builder import Settings
from dynamo_backends.trt.options import TensorRTOptions


def batch_norm() -> tuple[Settings, bytes, dict[str, torch.Tensor]]:
    """A `BatchNormalization` whose statistics are weights without data.

    Returns:
        Settings, the serialized model, and weights.
    """
    names = ("scale", "shift", "mean", "variance")
    node = helper.make_node("BatchNormalization", ["x", *names], ["y"], name="norm/0")
    initializers = [_external(name, (3,), 12 * i) for i, name in enumerate(names)]
    graph = helper.make_graph(
        [node],
        "main",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3, 4])],
        initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    weights = {name: torch.rand(3) + 0.5 for name in names}
    return Settings(TensorRTOptions(), 0, False), model.SerializeToString(), weights


def _external(name: str, shape: tuple[int, ...], offset: int) -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape)
    tensor.data_location = TensorProto.EXTERNAL
    facts = {"location": "weights", "offset": offset, "length": 4 * math.prod(shape)}
    for key, value in facts.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor

"""ONNX files with weights, of what `onnxrt` has compiled; sizes that vary stay symbolic."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime
import torch
from onnx_ir.tensor_adapters import TorchTensor
from torch import Tensor

from dynamo_backends._torch_private import from_dlpack
from dynamo_backends.graph.layouts import (
    MemoryLayout,
    infer_input_layout,
    infer_layout,
    to_row_major,
)
from dynamo_backends.interface.errors import SaveError
from dynamo_backends.ort.cuda import CPU
from dynamo_backends.ort.session import make_ort_value
from dynamo_backends.package.whole import Whole

_ONE_FILE = 1 << 30
"""Bytes of weights up to which the model is one file; protobuf ends at 2 GiB."""


def write_model(path: str | os.PathLike[str], whole: Whole) -> list[int]:
    """Writes a model; which activations of the graph are its inputs.

    Args:
        path: Path of the file; more than 1 GiB of weights go to `<path>.data`.
        whole: The model, compiled by `onnxrt`.

    Raises:
        SaveError: An output of varying size is a view that repeats elements.
    """
    executable: Any = whole.executable
    model = ir.from_proto(onnx.load_model_from_string(executable.model))
    tensors = executable.model_weights(list(whole.weights.values()))
    for name, tensor in tensors.items():
        model.graph.initializers[name].const_value = TorchTensor(tensor.cpu(), name=name)
    names, graph = executable.wiring.inputs, whole.graph
    spots = {value.name: value for value in model.graph.inputs}
    used = [at for at, i in enumerate(graph.activations) if names[i] is not None]
    for at in used:
        i = graph.activations[at]
        fake = graph.placeholders[i].meta["val"]
        _present_input(model, spots[names[i]], infer_input_layout(fake), whole.input_names[at])
    for at, name in enumerate(whole.output_names):
        _present_output(model, at, graph.outputs[at].meta["val"], name)
    size = sum(tensor.nbytes for tensor in tensors.values())
    ir.save(model, path, external_data=None if size <= _ONE_FILE else f"{Path(path).name}.data")
    return used


def run_file(path: str | os.PathLike[str], inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Runs an ONNX model on CPU tensors.

    Args:
        path: Path of the model.
        inputs: By the names of the model's.
    """
    session = onnxruntime.InferenceSession(path, providers=[CPU])
    given = {name: _to_ort(to_row_major(tensor)) for name, tensor in inputs.items()}
    return list(map(_from_ort, session.run_with_ort_values(None, given)))


def _to_ort(tensor: Tensor) -> onnxruntime.OrtValue:
    if tensor.dtype == torch.bfloat16:  # which numpy does not have
        return onnxruntime.OrtValue(make_ort_value(tensor))
    return onnxruntime.OrtValue.ortvalue_from_numpy(tensor.numpy())


def _from_ort(value: Any) -> Tensor:
    if "bfloat16" in value.data_type():
        return from_dlpack(value._ortvalue.to_dlpack()).clone()
    return torch.from_numpy(value.numpy())


def _present_input(model: ir.Model, stored: ir.Value, storage: MemoryLayout, name: str) -> None:
    """Gives an input its own name and the tensor's own order of dimensions."""
    if storage.is_row_major:
        stored.name = name
        return
    logical = ir.Value(name=name, shape=_logical(stored, storage), type=stored.type)
    transpose = ir.node("Transpose", [logical], {"perm": list(storage.order)})
    for user, place in list(stored.uses()):
        user.replace_input_with(place, transpose.outputs[0])
    model.graph.inputs[list(model.graph.inputs).index(stored)] = logical
    model.graph.insert_before(model.graph[0], transpose)


def _present_output(model: ir.Model, at: int, fake: Tensor, name: str) -> None:
    """Gives an output its own name and the tensor's own order and number of elements."""
    value, storage = model.graph.outputs[at], infer_layout(fake)
    if not storage.is_row_major:
        added = [ir.node("Transpose", [value], {"perm": storage.inverse_order})]
        shape = _logical(value, storage)
        if storage.expanded:
            if not shape.is_static():
                raise SaveError(
                    f"result {name} has overlapping elements (for example from expand) and dynamic "
                    "sizes. Clone it in the model."
                )
            shape = ir.Shape(fake.shape)
            sizes = ir.node("Constant", [], {"value_ints": list(fake.shape)})
            added += [sizes, ir.node("Expand", [added[0].outputs[0], sizes.outputs[0]])]
        model.graph.extend(added)
        result = added[-1].outputs[0]
        result.shape, result.type = shape, value.type
        model.graph.outputs[at] = value = result
    value.name = name


def _logical(stored: ir.Value, storage: MemoryLayout) -> ir.Shape:
    """Returns the shape of a stored tensor in the tensor's own order of dimensions."""
    assert stored.shape is not None  # of inputs and outputs it is known
    return ir.Shape([stored.shape[d] for d in storage.inverse_order])

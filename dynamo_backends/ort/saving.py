"""Writes what was compiled to a file that plain onnxruntime loads."""

import os
from collections.abc import Sequence
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx_ir.tensor_adapters import TorchTensor
from torch import Tensor

from dynamo_backends.graph.layouts import infer_input_layout, infer_layout
from dynamo_backends.interface.errors import CompileError
from dynamo_backends.interface.report import GraphReport
from dynamo_backends.ort.runtime import OrtExecutable
from dynamo_backends.runtime.load_or_compile import require_single_executable

_ONE_FILE = 1 << 30
"""Bytes of weights up to which the model is one file; protobuf ends at 2 GiB."""


def save(
    report: GraphReport,
    path: str | os.PathLike[str],
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> None:
    """Saves a compiled graph as an ONNX model, with the weights of its last call.

    Example:
        >>> with dynamo_backends.record() as reports:
        ...     compiled(x)
        >>> dynamo_backends.ort.save(reports[0], "model.onnx")

    Args:
        report: Report of the graph. It must have static shapes and run whole on ONNX Runtime.
        path: The file to write. With more than 1 GiB of weights, these go to `<path>.data`.
        input_names: Of the graph's inputs that are not weights, in order; "input_0", ... by
            default. Dimensions are in the tensors' own order, whatever their strides are.
        output_names: Of its outputs, in order; "output_0", ... by default.

    Raises:
        CompileError: The graph is not one that can be saved; the message says why.
        ValueError: The number of names is wrong.
    """
    executable = require_single_executable(report, OrtExecutable, "ONNX Runtime")
    model = ir.from_proto(onnx.load_model_from_string(executable.model))
    size = _fill_weights(model, executable)
    graph = executable.graph
    values = [p.meta["val"] for p in graph.placeholders]
    names = executable.wiring.inputs
    used = [i for i in graph.activations if names[i] is not None]
    given = _names(input_names, len(used), "input")
    wanted = _names(output_names, len(graph.outputs), "output")
    spots = {value.name: value for value in model.graph.inputs}
    for i, name in zip(used, given, strict=True):
        _present_input(model, spots[names[i]], values[i], name)
    for at, name in enumerate(wanted):
        _present_output(model, at, graph.outputs[at].meta["val"], name)
    path = os.path.expanduser(path)
    data = None if size <= _ONE_FILE else f"{Path(path).name}.data"
    ir.save(model, path, external_data=data)


def _fill_weights(model: ir.Model, executable: OrtExecutable) -> int:
    """Gives the initializers their data; returns its size in bytes."""
    if not executable.weight_places:
        return 0
    weights = [ref() for ref in executable.last_weights or ()]
    alive = [w for w in weights if w is not None]
    if not weights or len(alive) < len(weights):
        raise CompileError(
            "the weights of the compiled model are not in memory; call the model before saving, "
            "and keep it alive"
        )
    tensors = executable.model_weights(alive)
    for name, tensor in tensors.items():
        model.graph.initializers[name].const_value = TorchTensor(tensor.cpu(), name=name)
    return sum(t.nbytes for t in tensors.values())


def _names(given: Sequence[str] | None, count: int, kind: str) -> Sequence[str]:
    names = [f"{kind}_{i}" for i in range(count)] if given is None else list(given)
    if len(names) != count:
        raise ValueError(f"the graph has {count} {kind}s, but {len(names)} names were given")
    return names


def _present_input(model: ir.Model, stored: ir.Value, fake: Tensor, name: str) -> None:
    """Gives an input its own name and the tensor's own order of dimensions."""
    storage = infer_input_layout(fake)
    if storage.is_row_major:
        stored.name = name
        return
    logical = ir.Value(name=name, shape=ir.Shape(fake.shape), type=stored.type)
    transpose = ir.node("Transpose", [logical], {"perm": list(storage.order)})
    for user, place in list(stored.uses()):
        user.replace_input_with(place, transpose.outputs[0])
    model.graph.inputs[list(model.graph.inputs).index(stored)] = logical
    model.graph.insert_before(model.graph[0], transpose)


def _present_output(model: ir.Model, at: int, fake: Tensor, name: str) -> None:
    """Gives an output its own name and the tensor's own order and number of dimensions."""
    value = model.graph.outputs[at]
    storage = infer_layout(fake)
    if not storage.is_row_major:
        shape = ir.node("Constant", [], {"value_ints": list(fake.shape)})
        transpose = ir.node("Transpose", [value], {"perm": storage.inverse_order})
        expand = ir.node("Expand", [transpose.outputs[0], shape.outputs[0]])
        model.graph.extend([shape, transpose, expand])
        result = expand.outputs[0]
        result.shape, result.type = ir.Shape(fake.shape), value.type
        model.graph.outputs[at] = value = result
    value.name = name

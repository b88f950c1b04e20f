"""OpenVINO's compiler: models with their weights in, requests that run them out."""

import functools
import io
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynamo_backends._torch_private import from_dlpack, to_dlpack
from dynamo_backends._torch_private.forks import keep_alive_in_children
from dynamo_backends.interface.forks import check_not_forked
from dynamo_backends.openvino.dtypes import DTYPES
from dynamo_backends.openvino.vendor import CompiledModel, Core, Model, Type, native, op, openvino


@dataclass(frozen=True)
class CompileSettings:
    """How OpenVINO compiles a model: device, precision, threads and properties.

    Attributes:
        device: OpenVINO's name of it: "CPU", "GPU.1", "NPU".
        precision: "float32" or "bf16".
        hint: "latency" or "throughput".
        threads: 0: as many as torch has when the model is compiled.
        config: Properties of the device, taking precedence over what the others imply.
    """

    device: str = "CPU"
    precision: str = "float32"
    hint: str = "latency"
    threads: int = 0
    config: tuple[tuple[str, Any], ...] = ()

    def device_properties(self) -> dict[str, Any]:
        """Converts the settings to OpenVINO's device properties."""
        exact = self.precision == "float32"
        chosen: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": "f32" if exact else "bf16",
            # Without it OpenVINO may quantise what it feeds to large matrix products.
            "EXECUTION_MODE_HINT": "ACCURACY" if exact else "PERFORMANCE",
            "PERFORMANCE_HINT": self.hint.upper(),
        }
        if self.device.startswith("CPU"):
            chosen["INFERENCE_NUM_THREADS"] = self.threads or torch.get_num_threads()
            chosen["ENABLE_CPU_PINNING"] = False  # it would bind threads that torch also runs on
        return {**chosen, **dict(self.config)}


_RANK = 3  # batch, queries, keys


@functools.cache
def _started() -> tuple[Core, int]:
    started = Core(), os.getpid()
    keep_alive_in_children(started[0])
    return started


def get_core() -> Core:
    """Returns this process's `openvino.Core`, created on first use.

    Raises:
        ForkedProcessError: It was started before this process was forked off.
    """
    made, pid = _started()
    check_not_forked(pid, "OpenVINO")
    return made


def available_devices() -> Sequence[str]:
    """Returns the names of the devices that OpenVINO finds, such as "CPU" and "GPU.0"."""
    available: Sequence[str] = get_core().available_devices
    return available


def device_full_name(device: str) -> str:
    """Returns a device's full hardware name, for cache keys; "" if it is absent."""
    try:
        return str(get_core().get_property(device, "FULL_DEVICE_NAME"))
    except RuntimeError:
        return ""


def writable_properties(device: str) -> Sequence[str]:
    """Returns the names of a device's properties that can be set."""
    properties = get_core().get_property(device, "SUPPORTED_PROPERTIES")
    return [name for name, access in properties.items() if access != "RO"]


def compile_model(model: Model, settings: CompileSettings) -> CompiledModel:
    """Compiles a model for the device that the settings name."""
    properties = settings.device_properties()
    if settings.device.startswith("CPU") and any(map(_is_attention_without_heads, model.get_ops())):
        # Blocks of it, with residual connections and an MLP, end the process while OpenVINO looks
        # for subgraphs that it compiles by Snippets (2026.4).
        properties.setdefault("SNIPPETS_MODE", "DISABLE")
    return _immortal(get_core().compile_model(model, settings.device, properties))


def _is_attention_without_heads(node: Any) -> bool:
    """Returns whether a node is the softmax of three dimensions of attention's batched products."""
    if node.get_type_name() != "Softmax" or node.get_output_partial_shape(0).rank != _RANK:
        return False
    readers = (reader.get_node() for reader in node.output(0).get_target_inputs())
    return any(reader.get_type_name() == "MatMul" for reader in readers)


def _immortal(compiled: CompiledModel) -> CompiledModel:
    keep_alive_in_children(compiled)
    return compiled


def clone_with_constants(model: Model, weights: Mapping[int, Tensor]) -> Model:
    """Clones a model and turns inputs into constants that share torch's memory.

    Args:
        model: It is not changed.
        weights: Row-major CPU tensors by the places of the inputs. Their memory is shared: it must
            live as long as the copy.
    """
    copy = model.clone()
    parameters = copy.get_parameters()
    for place, tensor in weights.items():
        constant = op.Constant(as_openvino_tensor(tensor, parameters[place]), shared_memory=True)
        constant.set_friendly_name(parameters[place].get_friendly_name())
        parameters[place].output(0).replace(constant.output(0))
        _round(constant, tensor)
    for place in weights:
        copy.remove_parameter(parameters[place])
    return copy


def _round(constant: Any, tensor: Tensor) -> None:
    """Casts a constant to bfloat16 as torch does; OpenVINO, where it folds the cast, truncates."""
    for consumer in constant.output(0).get_target_inputs():
        cast = consumer.get_node()
        if cast.get_type_name() == "Convert" and cast.get_element_type() == DTYPES[torch.bfloat16]:
            rounded = op.Constant(as_openvino_tensor(tensor.bfloat16()), shared_memory=False)
            cast.output(0).replace(rounded.output(0))


def find_passthrough_outputs(compiled: CompiledModel) -> dict[int, int]:
    """Maps indices of outputs that merely return an input to that input's index.

    OpenVINO's CPU device leaves the memory that was given for such an output untouched.
    """
    inputs = {port.get_node().get_friendly_name(): i for i, port in enumerate(compiled.inputs)}
    sources = {
        result.get_friendly_name(): result.input_value(0).get_node()
        for result in compiled.get_runtime_model().get_results()
    }
    found = {}
    for place, port in enumerate(compiled.outputs):
        source = sources[port.get_node().get_friendly_name()]
        if source.get_type_name() == "Parameter":
            found[place] = inputs[source.get_friendly_name()]
    return found


def make_infer_request(compiled: CompiledModel) -> Any:
    """Creates an inference request of the native class, without the Python wrapper's cost."""
    request = native.CompiledModel.create_infer_request(compiled)
    keep_alive_in_children(request)
    return request


def as_openvino_tensor(tensor: Tensor, port: Any = None) -> openvino.Tensor:
    """Makes an OpenVINO tensor that shares the memory of a row-major CPU tensor.

    OpenVINO's tensor keeps the memory alive, requests that it is given to do not.

    Args:
        tensor: The tensor.
        port: The input or output of a model that it is for; 64-bit integers may be pairs there (see
            `wide_integers`).
    """
    if type(tensor) is not Tensor:  # a subclass may have ideas of its own about `numpy`
        tensor = from_dlpack(to_dlpack(tensor))
    if tensor.dtype == torch.bfloat16:
        carrier = tensor.view(torch.int16).numpy()
        return openvino.Tensor(carrier, list(tensor.shape), DTYPES[tensor.dtype])
    if tensor.dtype == torch.int64 and port is not None and port.get_element_type() == Type.i32:
        halves = tensor.view(-1).view(torch.int32).numpy()
        return openvino.Tensor(halves, [*tensor.shape, 2], Type.i32)
    return openvino.Tensor(tensor.numpy(), shared_memory=True)


def export_compiled(compiled: CompiledModel) -> bytes:
    """Exports a compiled model as bytes, for the same kind of machine."""
    stream = io.BytesIO()
    compiled.export_model(stream)
    return stream.getvalue()


def import_compiled(blob: bytes, settings: CompileSettings) -> CompiledModel:
    """Loads an exported compiled model; raises if the bytes are damaged or foreign."""
    return _immortal(get_core().import_model(blob, settings.device, settings.device_properties()))


def serialize_model(model: Model) -> tuple[bytes, bytes]:
    """Serializes an uncompiled model: its XML text, and its constants."""
    with tempfile.TemporaryDirectory() as folder:
        text, constants = Path(folder) / "model.xml", Path(folder) / "model.bin"
        openvino.serialize(model, text, constants)
        return text.read_bytes(), constants.read_bytes()


def deserialize_model(text: bytes, constants: bytes) -> Model:
    """Reads a serialized model; raises on damaged bytes."""
    data = np.frombuffer(constants or b"\0", dtype=np.uint8)
    return get_core().read_model(text, openvino.Tensor(data.copy()))

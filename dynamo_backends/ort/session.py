"""ONNX Runtime sessions: one per set of prepared weights, on torch's number of threads."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import onnxruntime
import torch
from onnxruntime.capi import _pybind_state as C
from torch import Tensor

from dynamo_backends._torch_private import to_dlpack
from dynamo_backends._torch_private.forks import keep_alive_in_children
from dynamo_backends.interface.errors import first_line
from dynamo_backends.ort import cuda
from dynamo_backends.runtime.freed_memory import return_free_memory

_LEVELS = {
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "none": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
}

# Threads spin between the operators of a run. After it they would take the processor from torch for
# milliseconds. Weights outside of the arena do not make it grow in powers of two.
DEFAULT_CONFIG = {
    "session.intra_op.allow_spinning": "1",
    "session.inter_op.allow_spinning": "0",
    "session.force_spinning_stop": "1",
    "session.use_device_allocator_for_initializers": "1",
}

_SLOW_ON_CPUS = ("SkipLayerNormFusion",)
"""Optimisations of ONNX Runtime that make graphs slower: its kernel of a sum that is normalized
takes three times as long as those of the sum and of the normalization."""

_MUCH = 16 << 20  # bytes

_SILENT = 4  # errors are raised as exceptions as well


@dataclass(frozen=True)
class SessionSettings:
    """The settings of a session: providers, device, threads, and optimization level.

    Attributes:
        providers: Execution providers with their options, the preferred one first.
        device: torch device type and index that inputs and outputs are on.
        threads: Of the session's own pool; 0: as many as torch has when the session is made.
        level: Graph optimisation: "all", "extended", "basic" or "none".
        config: Session configuration entries, taking precedence over `DEFAULT_CONFIG`.
        graphs: Whether the provider records runs as a CUDA graph, which needs memory that stays
            where it is.
    """

    providers: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    device: tuple[str, int] = ("cpu", 0)
    threads: int = 0
    level: str = "all"
    config: tuple[tuple[str, str], ...] = ()
    graphs: bool = False

    def options(self) -> onnxruntime.SessionOptions:
        """Returns these settings as `onnxruntime.SessionOptions`."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads or torch.get_num_threads()
        options.inter_op_num_threads = 1
        options.graph_optimization_level = _LEVELS[self.level]
        options.log_severity_level = _SILENT
        for key, value in {**DEFAULT_CONFIG, **dict(self.config)}.items():
            options.add_session_config_entry(key, value)
        return options


def make_session(
    model: bytes, weights: Mapping[str, Tensor], settings: SessionSettings, ranged: bool = False
) -> Any:
    """Creates an ONNX Runtime session of a model with its weights.

    Args:
        model: Serialized; its initializers without data are those in `weights`.
        weights: Row-major tensors by the initializers' names. CPU tensors are not copied before the
            session prepares them; it keeps a copy of each, prepared or not.
        settings: How to make it.
        ranged: It will be run with inputs of many sizes.

    Returns:
        ONNX Runtime's own session object (of the Python wrapper's attribute `_sess`).
    """
    options = settings.options()
    # A pattern is one block for all temporaries of a run. Those of other sizes do not fit into it.
    options.enable_mem_pattern = not ranged
    much = sum(t.nbytes for t in weights.values()) > _MUCH
    if much:
        return_free_memory()  # that lowering took: preparing weights is the peak
    if weights:
        options.add_external_initializers(
            list(weights), [onnxruntime.OrtValue(make_ort_value(t.cpu())) for t in weights.values()]
        )
    names = [name for name, _ in settings.providers]
    provider_options = [
        cuda.add_stream_option(name, dict(entries), settings.device)
        for name, entries in settings.providers
    ]
    session = onnxruntime.InferenceSession(
        model,
        options,
        providers=names,
        provider_options=provider_options,
        disabled_optimizers=_SLOW_ON_CPUS if settings.device[0] == "cpu" else None,
    )
    session.disable_fallback()
    keep_alive_in_children(session._sess)
    if much:
        return_free_memory()  # that weights took between two of the session's optimisations
    return session._sess


def make_ort_value(tensor: Tensor) -> Any:
    """Wraps a row-major CPU tensor as an OrtValue that shares and keeps its memory."""
    # A tensor of its own, so that the value does not keep the caller's Parameter alive.
    own, is_bool = tensor.detach(), tensor.dtype == torch.bool
    # ONNX Runtime reads no bool of DLPack; told so, it takes bytes for it.
    return C.OrtValue.from_dlpack(to_dlpack(own.view(torch.uint8) if is_bool else own), is_bool)


def run_options(settings: SessionSettings) -> onnxruntime.RunOptions:
    """Returns the run options: on CUDA, do not synchronize the host after a run."""
    options = onnxruntime.RunOptions()
    if settings.device[0] == "cuda":
        options.add_run_config_entry(*cuda.NO_SYNCHRONIZATION)
    return options


def turn_weights_into_inputs(model: bytes) -> bytes:
    """Turns a model's external initializers into inputs; returns it serialized."""
    proto = onnx.load_model_from_string(model)
    graph = proto.graph
    weights = [t for t in graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    for tensor in weights:
        value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        graph.input.append(value)
        graph.initializer.remove(tensor)
    return proto.SerializeToString()


def ort_device(device: tuple[str, int]) -> Any:
    """Returns the `OrtDevice` of a torch device type and index."""
    kind = C.OrtDevice.cuda() if device[0] == "cuda" else C.OrtDevice.cpu()
    return C.OrtDevice(kind, C.OrtDevice.default_memory(), device[1])


def available_providers() -> Sequence[str]:
    """Returns the names of the installed wheel's execution providers."""
    return onnxruntime.get_available_providers()


def plain_message(error: BaseException) -> str:
    """Returns the first line of an ONNX Runtime error, without its codes."""
    return re.sub(r"^\[ONNXRuntimeError\] : \d+ : ([A-Z_]+) : ", r"\1: ", first_line(error))

"""One deserialized engine: its weights, and the contexts that run it."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from onnx import AttributeProto, NodeProto, TensorProto, numpy_helper
from torch import Tensor

from dynamo_backends.interface.errors import CompileError
from dynamo_backends.trt import vendor
from dynamo_backends.trt.device import driver, to_tensorrt
from dynamo_backends.trt.engine_builder import Settings, parser_errors, placeholder_weights

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
    """Returns the constants of a model by the names that TensorRT's parser gives them."""
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


class Engine:
    """An engine without weights until `refit` has given it some.

    Args:
        plan: The serialized engine.
        model: The ONNX model it was built from, without the weights' data.
        settings: What it was built for.

    Raises:
        CompileError: TensorRT does not take the plan: it is damaged, or of another version or GPU.
    """

    def __init__(self, plan: bytes, model: bytes, settings: Settings):
        trt = vendor.tensorrt()
        self._model = model
        self._constants = constants_of(model) if model else {}
        self._index = settings.device
        self._runtime = trt.Runtime(vendor.logger())
        if settings.options.version_compatible:
            self._runtime.engine_host_code_allowed = True  # such plans bring a runtime of their own
        with driver().stream(self._index):
            self._engine = self._runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            raise CompileError(f"TensorRT cannot load the engine: {vendor.last_error()}")
        if settings.options.weight_streaming >= 0:
            self._engine.weight_streaming_budget_v2 = self._budget(settings.options)
        self._lock = threading.Lock()
        self._use = threading.Lock()  # weights do not change while a thread launches the engine
        self._contexts: dict[int, list[Any]] = {}
        self._recorded: list[Any] = []

    def _budget(self, options: Any) -> int:
        budget = options.weight_streaming or self._engine.get_weight_streaming_automatic_budget()
        return min(int(budget), int(self._engine.streamable_weights_size))

    def tensors(self) -> dict[str, Any]:
        """TensorRT's element types of the inputs and outputs, by name."""
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        return {name: self._engine.get_tensor_dtype(name) for name in names}

    def refit(self, weights: Mapping[str, Tensor]) -> None:
        """Gives the engine these weights; waits until the device has nothing to do.

        Args:
            weights: Row-major tensors on the engine's device, by the names in the model.

        Raises:
            CompileError: TensorRT does not take them.
        """
        if not (weights or self._constants):
            return
        with self._use:
            driver().synchronize(self._index)  # calls that are under way read the old weights
            self._refit(weights)

    def _refit(self, weights: Mapping[str, Tensor]) -> None:
        refitter = vendor.tensorrt().Refitter(self._engine, vendor.logger())
        kept: object = None
        known = set(refitter.get_all_weights())
        if not known.issuperset(weights) or not self._set_all(refitter, weights):
            # The parser has combined some, such as those of a batch normalisation.
            kept = self._parse_all(refitter, weights)
        missing = refitter.get_missing_weights()
        if missing:
            raise CompileError(
                "the TensorRT engine needs weights that the graph does not have: "
                f"{', '.join(missing[:5])}"
            )
        with driver().stream(self._index) as stream:
            refitted = refitter.refit_cuda_engine_async(stream)
        driver().synchronize(self._index)
        del kept
        if not refitted:
            raise CompileError(
                f"TensorRT cannot refit the engine with new weights: {vendor.last_error()}"
            )

    def _set_all(self, refitter: Any, weights: Mapping[str, Tensor]) -> bool:
        """Sets weights where torch has them, and constants that go with them; False: not all."""
        trt = vendor.tensorrt()
        for name, tensor in weights.items():
            given = trt.Weights(to_tensorrt(tensor.dtype), tensor.data_ptr(), tensor.numel())
            if not refitter.set_named_weights(name, given, trt.TensorLocation.DEVICE):
                raise CompileError(f"TensorRT rejects the weight {name!r}: {vendor.last_error()}")
        for name in refitter.get_missing_weights():
            constant = self._constants.get(name)
            if constant is None:
                return False
            refitter.set_named_weights(name, constant.weights(), trt.TensorLocation.HOST)
        return not refitter.get_missing_weights()

    def _parse_all(self, refitter: Any, weights: Mapping[str, Tensor]) -> object:
        """Lets TensorRT's parser put weights where its reading of the model needs them."""
        parser = vendor.tensorrt().OnnxParserRefitter(refitter, vendor.logger())
        host = {name: tensor.cpu() for name, tensor in weights.items()}
        with placeholder_weights(self._model) as path:
            taken = parser.load_model_proto(self._model, path)
            for name, tensor in host.items():
                taken = taken and parser.load_initializer(name, tensor.data_ptr(), tensor.nbytes)
            if not (taken and parser.refit_model_proto()):
                reason = parser_errors(parser)
                raise CompileError(f"TensorRT cannot refit the engine with new weights: {reason}")
        return parser, host

    def serialize(self) -> bytes:
        """Returns the engine with its weights, as a file that any program can load."""
        config = self._engine.create_serialization_config()
        config.clear_flag(vendor.tensorrt().SerializationFlag.EXCLUDE_WEIGHTS)
        return bytes(self._engine.serialize_with_config(config))

    def take_context(self, stream: int) -> Any:
        """Returns an execution context that nobody else uses, for one stream.

        Calls of a context on different streams would overlap, so each stream has its own.
        """
        with self._lock:
            free = self._contexts.setdefault(stream, [])
            if free:
                return free.pop()
        strategy = vendor.tensorrt().ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(strategy)
        if context is None:
            raise RuntimeError(
                f"TensorRT cannot create an execution context: {vendor.last_error()}"
            )
        return context

    def give_context(self, stream: int, context: Any) -> None:
        """Hands a context back; the work that it has launched may still be running.

        A context that was recorded in a CUDA graph is that graph's from then on.
        """
        with self._lock:
            recorded = driver().is_capturing()
            (self._recorded if recorded else self._contexts[stream]).append(context)

    def run(
        self,
        context: Any,
        stream: int,
        tensors: Sequence[tuple[str, Tensor]],
        shapes: Sequence[tuple[str, tuple[int, ...]]],
        device: torch.device,
    ) -> Tensor:
        """Launches the engine on a stream.

        Args:
            context: From `take_context`.
            stream: Its handle.
            tensors: All inputs and outputs, row-major.
            shapes: Shapes of the inputs whose shapes vary.
            device: Device of the tensors, where scratch memory is taken from torch.

        Returns:
            The scratch memory, which must live until torch's stream waits for this one.

        Raises:
            RuntimeError: TensorRT refuses a shape or an address, or cannot launch.
        """
        with self._use:
            _place(context, tensors, shapes)
            size = self._scratch_size(context, varies=bool(shapes))
            scratch = torch.empty(size, dtype=torch.uint8, device=device)
            context.set_device_memory(scratch.data_ptr(), size)
            if not context.execute_async_v3(stream):
                raise RuntimeError(f"TensorRT cannot run the engine: {vendor.last_error()}")
            return scratch

    def _scratch_size(self, context: Any, varies: bool) -> int:
        """Bytes; at least one, so that there is an address."""
        if varies:
            return max(int(context.update_device_memory_size_for_shapes()), 1)
        return max(int(self._engine.device_memory_size_v2), 1)


def _place(
    context: Any,
    tensors: Sequence[tuple[str, Tensor]],
    shapes: Sequence[tuple[str, tuple[int, ...]]],
) -> None:
    """Tells a context the shapes and addresses of its tensors."""
    for name, shape in shapes:
        if not context.set_input_shape(name, shape):
            reason = vendor.last_error()
            raise RuntimeError(f"TensorRT rejects the shape {list(shape)} of {name!r}: {reason}")
    for name, tensor in tensors:
        if not context.set_tensor_address(name, tensor.data_ptr()):
            raise RuntimeError(f"TensorRT rejects the memory of {name!r}")

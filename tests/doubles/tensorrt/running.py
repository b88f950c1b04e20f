"""Runtime, engines, execution contexts and refitters."""

import ctypes
import threading
from typing import Any

import numpy as np
import onnx

from tests.doubles.tensorrt import memory, models
from tests.doubles.tensorrt.building import IHostMemory, read, volume, write
from tests.doubles.tensorrt.checking import Misuse, Native, checked
from tests.doubles.tensorrt.device import active
from tests.doubles.tensorrt.enums import (
    DataType,
    ExecutionContextAllocationStrategy,
    SerializationFlag,
    Severity,
    TensorLocation,
)
from tests.doubles.tensorrt.parsing import ILogger, check_logger

Dims = tuple[int, ...]
_SCRATCH = 4096
_STATIC = ExecutionContextAllocationStrategy.STATIC


class Weights(Native):
    """Memory of the caller's."""

    @checked
    def __init__(self, type: DataType, ptr: int = 0, count: int = 0):
        self._facts = type, ptr, count

    @property
    def dtype(self) -> DataType:
        return self._facts[0]

    @property
    def size(self) -> int:
        return self._facts[2]


class ICudaEngine(Native):
    """A model, its weights, and the ranges that it serves."""

    def __init__(self, log: Any, facts: dict[str, Any], model: bytes, logger: ILogger):
        self._log = log
        self._facts = facts
        self._model = onnx.load_model_from_string(model)
        self._logger = logger
        self._external = models.external(self._model.graph)
        stripped = "STRIP_PLAN" in facts["flags"]
        self._constants = models.constants(self._model.graph) if stripped else {}
        self._weights: dict[str, bytes] = {}
        self._sessions: dict[int, Any] = {}
        self._running = threading.Lock()
        self._generation = 0
        self._budget = 0
        graph = self._model.graph
        self._io = {v.name: v for v in (*graph.input, *graph.output)}
        self._inputs = [v.name for v in graph.input]

    @property
    def num_io_tensors(self) -> int:
        return len(self._io)

    @checked
    def get_tensor_name(self, index: int) -> str:
        return list(self._io)[index]

    @checked
    def get_tensor_dtype(self, name: str) -> DataType:
        kind = models.data_type(self._io[name].type.tensor_type.elem_type)
        assert kind is not None
        return kind

    @property
    def refittable(self) -> bool:
        return "REFIT" in self._facts["flags"]

    @property
    def device_memory_size_v2(self) -> int:
        return _SCRATCH

    @property
    def streamable_weights_size(self) -> int:
        if "WEIGHT_STREAMING" not in self._facts["flags"]:
            return 0
        return sum(len(data) for data in self._weights.values()) or 1 << 20

    @property
    def weight_streaming_budget_v2(self) -> int:
        return self._budget

    @weight_streaming_budget_v2.setter
    def weight_streaming_budget_v2(self, budget: int) -> None:
        if "WEIGHT_STREAMING" not in self._facts["flags"]:
            raise Misuse("the engine was not built with WEIGHT_STREAMING")
        self._budget = budget
        self._log.budgets.append(budget)

    def get_weight_streaming_automatic_budget(self) -> int:
        return 1 << 10

    @checked
    def create_execution_context(
        self, strategy: ExecutionContextAllocationStrategy = _STATIC
    ) -> Native:
        self._log.contexts += 1
        return IExecutionContext(self, strategy)

    def create_serialization_config(self) -> Native:
        return ISerializationConfig()

    @checked
    def serialize_with_config(self, arg0: Native) -> Native:
        facts = {
            **self._facts,
            "flags": [f for f in self._facts["flags"] if f not in ("REFIT", "STRIP_PLAN")],
        }
        model = onnx.ModelProto()
        model.CopyFrom(self._model)
        if SerializationFlag.EXCLUDE_WEIGHTS not in arg0._flags:
            models.fill(model, self._weights)
        return IHostMemory(write(facts, model.SerializeToString()))

    def _session(self) -> Any:
        missing = {*self._external, *self._constants} - set(self._weights)
        if missing:
            raise Misuse(f"the engine was run before it got the weights {sorted(missing)}")
        if self._generation not in self._sessions:
            self._sessions.clear()
            self._sessions[self._generation] = models.session(self._model, self._weights)
        return self._sessions[self._generation]


class ISerializationConfig(Native):
    """What a serialized engine holds; without weights that can be given anew by default."""

    def __init__(self) -> None:
        self._flags = {SerializationFlag.EXCLUDE_WEIGHTS, SerializationFlag.EXCLUDE_LEAN_RUNTIME}

    @checked
    def clear_flag(self, flag: SerializationFlag) -> bool:
        self._flags.discard(flag)
        return True


class IExecutionContext(Native):
    """Runs an engine."""

    def __init__(self, engine: ICudaEngine, strategy: ExecutionContextAllocationStrategy):
        self._engine = engine
        self._strategy = strategy
        self._addresses: dict[str, int] = {}
        self._shapes: dict[str, Dims] = {}
        self._scratch: tuple[int, int] | None = None
        self._stream: int | None = None
        self._busy = threading.Lock()

    @checked
    def set_input_shape(self, name: str, shape: Dims) -> bool:
        if name not in self._engine._inputs:
            return False
        declared = models.shape_of(self._engine._io[name])
        ranges = self._engine._facts["ranges"].get(name, (declared, declared, declared))
        if len(shape) != len(declared) or any(
            not low <= n <= high for low, n, high in zip(ranges[0], shape, ranges[2], strict=True)
        ):
            text = f"Supplied binding dimension {shape} for {name} is not in {ranges}"
            self._engine._logger.log(Severity.ERROR, text)
            return False
        self._shapes[name] = tuple(shape)
        return True

    @checked
    def set_tensor_address(self, name: str, memory: int) -> bool:
        if name not in self._engine._io or not memory:
            return False
        self._addresses[name] = memory
        return True

    @checked
    def set_device_memory(self, memory: int, size: int) -> None:
        self._scratch = memory, size

    def update_device_memory_size_for_shapes(self) -> int:
        self._input_shapes()
        return _SCRATCH // 2

    @checked
    def execute_async_v3(self, stream_handle: int) -> bool:
        if not self._busy.acquire(blocking=False):
            raise Misuse("two threads run one execution context")
        try:
            self._check(stream_handle)
            self._execute()
        finally:
            self._busy.release()
        self._engine._log.runs += 1
        return True

    def _check(self, stream: int) -> None:
        if not active() or active()[-1] != stream:
            raise Misuse(f"{stream} is not the current stream of this thread")
        if self._stream not in (None, stream):
            raise Misuse("an execution context was used on two streams")
        self._stream = stream
        unset = set(self._engine._io) - set(self._addresses)
        if unset:
            raise Misuse(f"no address was set for {sorted(unset)}")
        if self._strategy == ExecutionContextAllocationStrategy.USER_MANAGED:
            needed = _SCRATCH // 2 if self._shapes else _SCRATCH
            if self._scratch is None or self._scratch[1] < needed:
                raise Misuse("the context was given too little device memory, or none")
            memory.at(*self._scratch, "the scratch memory") if not memory.STRICT[0] else None

    def _input_shapes(self) -> dict[str, Dims]:
        found = {}
        for name in self._engine._inputs:
            declared = models.shape_of(self._engine._io[name])
            if -1 in declared and name not in self._shapes:
                raise Misuse(f"the shape of {name!r} was not set")
            found[name] = self._shapes.get(name, declared)
        return found

    def _execute(self) -> None:
        engine = self._engine
        with engine._running:
            session = engine._session()
        feeds = {}
        for name, shape in self._input_shapes().items():
            feeds[name] = models.to_numpy(
                self._bytes(name, shape), engine.get_tensor_dtype(name), shape
            )
        names = [v.name for v in engine._model.graph.output]
        for name, result in zip(names, session.run(names, feeds), strict=True):
            data = models.to_bytes(result, engine.get_tensor_dtype(name))
            if data.size:
                self._bytes(name, result.shape, writable=True)[:] = data
        self._addresses.clear()  # so that addresses of earlier calls are noticed
        self._scratch = None

    def _bytes(self, name: str, shape: Dims, writable: bool = False) -> np.ndarray:
        size = volume(shape) * models.item_size(self._engine.get_tensor_dtype(name))
        if not size:
            return np.empty(0, dtype=np.uint8)
        return memory.at(self._addresses[name], size, repr(name))


class Runtime(Native):
    """Loads engines."""

    _log: Any
    _version = ""

    @checked
    def __init__(self, logger: ILogger):
        check_logger(logger)
        self._logger = logger
        self._trusts = False

    @property
    def engine_host_code_allowed(self) -> bool:
        return self._trusts

    @engine_host_code_allowed.setter
    def engine_host_code_allowed(self, allowed: bool) -> None:
        self._trusts = allowed

    @checked
    def deserialize_cuda_engine(self, serialized_engine: bytes) -> ICudaEngine | None:
        found = read(bytes(serialized_engine))
        reason = "the plan is damaged" if found is None else self._why_not(found[0])
        if reason is not None:
            self._logger.log(Severity.ERROR, f"deserialization failed: {reason}")
            return None
        self._log.loads += 1
        return ICudaEngine(self._log, *found, self._logger)

    def _why_not(self, facts: dict[str, Any]) -> str | None:
        compatible = "VERSION_COMPATIBLE" in facts["flags"]
        if facts["version"] != self._version and not compatible:
            return f"the plan is of version {facts['version']}"
        if compatible and not self._trusts:
            return "the plan holds host code, which is not allowed"
        if facts["hardware"] == "NONE" and facts["device"] != self._log.device.name:
            return f"the plan is of another device, {facts['device']}"
        return None


class Refitter(Native):
    """Gives an engine other weights."""

    _log: Any

    @checked
    def __init__(self, engine: ICudaEngine, logger: ILogger):
        check_logger(logger)
        if not engine.refittable:
            raise Misuse("the engine was not built with REFIT")
        self._engine = engine
        self._set: dict[str, Weights] = {}
        self._taken: dict[str, bytes] = {}

    def get_all_weights(self) -> list[str]:
        names = [*self._engine._external, *self._engine._constants]
        return [n for n in names if n not in self._combined()]

    def get_missing_weights(self) -> list[str]:
        known = {*self._set, *self._taken, *self._engine._weights}
        return [n for n in (*self._engine._external, *self._engine._constants) if n not in known]

    @checked
    def get_weights_prototype(self, weights_name: str) -> Weights:
        if weights_name in self._engine._constants:
            return Weights(
                self._engine._constants[weights_name][0],
                0,
                self._engine._constants[weights_name][1],
            )
        tensor = self._engine._external[weights_name]
        kind = models.data_type(tensor.data_type)
        assert kind is not None
        return Weights(kind, 0, volume(tuple(tensor.dims)))

    @checked
    def set_named_weights(
        self, name: str, weights: Weights, location: TensorLocation = TensorLocation.HOST
    ) -> bool:
        if name not in self.get_all_weights():
            return False
        prototype = self.get_weights_prototype(name)
        if (weights.dtype, weights.size) != (prototype.dtype, prototype.size):
            return False
        if name in self._engine._constants:
            self._take_constant(name, weights, location)
            return True
        if location != TensorLocation.DEVICE:
            raise Misuse(f"the weight {name!r} was copied to the host")
        self._set[name] = weights
        return True

    @checked
    def refit_cuda_engine_async(self, stream_handle: int) -> bool:
        if not active() or active()[-1] != stream_handle:
            raise Misuse(f"{stream_handle} is not the current stream of this thread")
        if self.get_missing_weights():
            return False
        engine = self._engine
        if not engine._running.acquire(blocking=False):
            raise Misuse("the engine is refitted while it runs")
        try:
            for name, weights in self._set.items():
                kind, address, count = weights._facts
                size = count * models.item_size(kind)
                data = memory.at(address, size, f"the weight {name!r}") if size else b""
                engine._weights[name] = bytes(data)
            engine._weights.update(self._taken)
            engine._generation += 1
        finally:
            engine._running.release()
        given = {*self._set, *self._taken} - set(engine._constants)
        if given:
            self._log.refits.append(sorted(given))
        return True

    def _combined(self) -> set[str]:
        """Weights that the parser has computed others from: those of batch normalisations."""
        return {
            name
            for node in self._engine._model.graph.node
            if node.op_type == "BatchNormalization"
            for name in node.input[1:]
        }

    def _take_constant(self, name: str, weights: Weights, location: TensorLocation) -> None:
        kind, address, count = weights._facts
        size = count * models.item_size(kind)
        data = (ctypes.c_char * size).from_address(address).raw if size else b""
        if location != TensorLocation.HOST or data != self._engine._constants[name][2]:
            raise Misuse(f"the constant {name!r} was given other data than the model has")
        self._take(name, data)

    def _take(self, name: str, data: bytes) -> None:
        self._taken[name] = data

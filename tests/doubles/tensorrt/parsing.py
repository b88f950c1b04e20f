"""The parser: from serialized ONNX to a network, or to what is wrong with it."""

import itertools
from pathlib import Path
from typing import Any

import onnx
from onnx import ModelProto

from tests.doubles.tensorrt import memory, models, operators
from tests.doubles.tensorrt.checking import Misuse, Native, checked
from tests.doubles.tensorrt.enums import ErrorCode, Severity


class ILogger:
    """To be subclassed; `log` is called from any thread."""

    Severity = Severity
    _ready = False

    def __init__(self) -> None:
        self._ready = True

    def log(self, severity: Severity, msg: str) -> None:
        raise NotImplementedError


def check_logger(logger: ILogger) -> None:
    """Refuses a logger whose native half was never made."""
    if not logger._ready:
        raise Misuse("ILogger.__init__ was not called")


class INetworkDefinition(Native):
    """Attributes: flags as `create_network` got them; the model once it is parsed."""

    def __init__(self, logger: ILogger, strongly_typed: bool):
        self._logger = logger
        self._strongly_typed = strongly_typed
        self._model: ModelProto | None = None
        self._weights: dict[str, bytes] = {}


class ParserError(Native):
    """One complaint of the parser."""

    def __init__(self, code: ErrorCode, desc: str, node: int, name: str, operator: str):
        self._facts = code, desc, node, name, operator

    def code(self) -> ErrorCode:
        return self._facts[0]

    def desc(self) -> str:
        return self._facts[1]

    def node(self) -> int:
        return self._facts[2]

    def node_name(self) -> str:
        return self._facts[3]

    def node_operator(self) -> str:
        return self._facts[4]


class _Errors(Native):
    def __init__(self) -> None:
        self._errors: list[ParserError] = []

    @property
    def num_errors(self) -> int:
        return len(self._errors)

    @checked
    def get_error(self, index: int) -> ParserError:
        return self._errors[index]


class OnnxParser(_Errors):
    """Reads one model into one network."""

    @checked
    def __init__(self, network: INetworkDefinition, logger: ILogger):
        check_logger(logger)
        super().__init__()
        self._network = network
        self._groups: list[tuple[list[int], bool]] | None = None

    @checked
    def parse(self, model: bytes, path: str | None = None) -> bool:
        if self._network._model is not None:
            raise Misuse("parse was called with a network that is not empty")
        proto = _read(bytes(model), self._errors)
        if proto is None:
            return False
        self._errors += _complaints(proto)
        if self._errors:
            return False
        self._network._model = proto
        self._network._weights = _weights(proto, path)
        return True

    @checked
    def supports_model_v2(self, model: bytes, path: str | None = None) -> bool:
        supported = self.parse(model, path)
        wrong = {e.node() for e in self._errors}
        count = len(onnx.load_model_from_string(bytes(model)).graph.node)
        runs = itertools.groupby(range(count), key=lambda i: i in wrong)
        self._groups = [(list(run), supported) for bad, run in runs if not bad]
        return supported

    @property
    def num_subgraphs(self) -> int:
        return len(self._asked())

    @checked
    def is_subgraph_supported(self, index: int) -> bool:
        return self._asked()[index][1]

    @checked
    def get_subgraph_nodes(self, index: int) -> list:
        return list(self._asked()[index][0])

    def _asked(self) -> list[tuple[list[int], bool]]:
        if self._groups is None:
            raise Misuse("supports_model_v2 was not called")
        return self._groups


class OnnxParserRefitter(_Errors):
    """Puts the initializers of a model into an engine that was built from it."""

    def __init__(self, refitter: Any, logger: ILogger):
        check_logger(logger)
        super().__init__()
        self._refitter = refitter
        self._model: ModelProto | None = None
        self._given: dict[str, tuple[int, int]] = {}

    @checked
    def load_model_proto(self, model: bytes, path: str | None = None) -> bool:
        self._model = _read(bytes(model), self._errors)
        if self._model is not None:
            _weights(self._model, path)
        return self._model is not None

    @checked
    def load_initializer(self, name: str, data: int, size: int) -> bool:
        if self._model is None:
            raise Misuse("load_model_proto was not called")
        tensor = models.external(self._model.graph).get(name)
        if tensor is None or _length(tensor) != size:
            return False
        self._given[name] = data, size
        return True

    def refit_model_proto(self) -> bool:
        if self._model is None:
            raise Misuse("load_model_proto was not called")
        for name, (address, size) in self._given.items():
            data = memory.at(address, size, f"the weight {name!r}") if size else b""
            self._refitter._take(name, bytes(data))
        for name, (_, _, data) in models.constants(self._model.graph).items():
            self._refitter._take(name, data)
        return True


def _read(model: bytes, errors: list[ParserError]) -> ModelProto | None:
    try:
        proto = onnx.load_model_from_string(model)
        onnx.checker.check_graph(_checkable(proto), _context(proto))
    except Exception as error:
        code = ErrorCode.MODEL_DESERIALIZE_FAILED
        errors.append(ParserError(code, f"Failed to parse the ONNX model: {error}", -1, "", ""))
        return None
    return proto


def _checkable(proto: ModelProto) -> onnx.GraphProto:
    """The graph without external data, whose files the checker would look for here."""
    graph = onnx.GraphProto()
    graph.CopyFrom(proto.graph)
    names = models.external(graph)
    kept = [t for t in graph.initializer if t.name not in names]
    for name, tensor in names.items():
        graph.input.append(
            onnx.helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims))
        )
    del graph.initializer[:]
    graph.initializer.extend(kept)
    return graph


def _context(proto: ModelProto) -> Any:
    context = onnx.checker.C.CheckerContext()
    context.ir_version = proto.ir_version
    context.opset_imports = {o.domain: o.version for o in proto.opset_import}
    return context


def _complaints(proto: ModelProto) -> list[ParserError]:
    """All that the static check finds, or else the first thing that importing stumbles over."""
    types, ranks = models.types_of(proto), models.ranks_of(proto)
    dynamic = []
    static = [
        _error(-1, value, "unsupported data type of an input or output")
        for value in (*proto.graph.input, *proto.graph.output)
        if models.data_type(value.type.tensor_type.elem_type) is None
    ]
    for i, node in enumerate(proto.graph.node):
        first = node.input[0] if node.input else node.output[0]
        reason = operators.refused_type(node, types.get(first))
        if reason is not None:
            static.append(_error(i, node, reason))
        reason = operators.restriction(node, ranks.get(first))
        if reason is not None:
            dynamic.append(_error(i, node, reason))
    return static or dynamic[:1]


def _error(index: int, node: Any, text: str) -> ParserError:
    operator = getattr(node, "op_type", "")
    return ParserError(ErrorCode.UNSUPPORTED_NODE, text, index, node.name, operator)


def _weights(proto: ModelProto, path: str | None) -> dict[str, bytes]:
    """The initializers' data from the file next to the model.

    Raises:
        Misuse: There is no such file, or it is too short.
    """
    found = {}
    for name, tensor in models.external(proto.graph).items():
        if path is None:
            raise Misuse(f"the weight {name!r} is external, and no path was given")
        facts = {e.key: e.value for e in tensor.external_data}
        with open(Path(path).parent / facts["location"], "rb") as file:
            file.seek(int(facts["offset"]))
            found[name] = file.read(int(facts["length"]))
        if len(found[name]) != _length(tensor):
            raise Misuse(f"the file with the weight {name!r} is too short")
    return found


def _length(tensor: onnx.TensorProto) -> int:
    kind = models.data_type(tensor.data_type)
    if kind is None:
        raise Misuse(f"the weight {tensor.name!r} has an unsupported type")
    count = 1
    for size in tensor.dims:
        count *= size
    return count * models.item_size(kind)

"""Graphs of static sizes as lines of JSON, and their tensors as safetensors.

Reading one runs nothing that it names: calls are operators that torch knows, or functions that the
reader names, and tensors are data. `precompile.pack` has graphs of symbolic sizes, too, for torch's
own files and for processes that trust each other: it is a pickle.

| what | checked |
|---|---|
| `torch._subclasses.FakeTensor`, made by factories under its mode | 2.13 |
| `torch._ops.OpOverload`: `namespace`, `_overloadname`, `overloadpacket` | 2.13 |
| `torch._functorch._aot_autograd.descriptors`: frozen dataclasses | 2.11+ |
"""

import dataclasses
import functools
import importlib
import json
import math
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses import FakeTensor

from dynamo_backends._torch_private.aot_graph_metadata import lazy_graph_module
from dynamo_backends._torch_private.tensors import has_conj_or_neg_bit
from dynamo_backends._torch_private.tracing import disable_current_modes

_GRAPH, _CONSTANTS, _STRIDES = "graph", "constants", "strides"
_SETTINGS = (torch.dtype, torch.layout, torch.memory_format)
_DESCRIPTORS = "torch._functorch._aot_autograd.descriptors"  # which imports torch._dynamo
_PARTS = "."  # between the parts of an operator's name
_OPS = ("placeholder", "call_function", "get_attr", "output")


class UnserializableError(Exception):
    """Raised when a graph cannot be serialized, such as one with symbolic sizes."""


@dataclasses.dataclass(frozen=True)
class FunctionTable:
    """Names for the functions, besides operators, that serialized graphs may call.

    Attributes:
        name_of: The name of a function; None: it has none.
        named: The function of a name.
        calls_methods: Whether graphs call methods of tensors, too.
        plain: What is written in the place of a value.
    """

    name_of: Callable[[Any], str | None]
    named: Callable[[str], Any]
    calls_methods: bool = False
    plain: Callable[[Any], Any] = lambda value: value


def make_function_table(functions: Mapping[str, Callable[..., Any]]) -> FunctionTable:
    """Makes a table in which only these functions, by name, may be called."""
    return FunctionTable({f: name for name, f in functions.items()}.get, functions.__getitem__)


FUNCTIONAL = make_function_table({"getitem": operator.getitem})
"""What a functional graph calls."""


def graph_to_text(
    graph: fx.Graph, functions: FunctionTable = FUNCTIONAL, kept: Collection[str] = ()
) -> str:
    """Serializes a graph as one line of JSON per node.

    Args:
        graph: The graph.
        functions: What it calls besides operators.
        kept: Keys of the nodes' `meta` that are written.

    Raises:
        UnserializableError: A size is symbolic, or something has no name.
    """
    encode = _Encoder({node: i for i, node in enumerate(graph.nodes)}, functions)
    nodes = []
    for node in graph.nodes:
        target = encode(node.target) if node.op == "call_function" else node.target
        meta = {key: node.meta[key] for key in kept if key in node.meta}
        lines = encode.shared(meta.pop("stack_trace", None))
        arguments = encode(node.args), encode(dict(node.kwargs))
        nodes.append([node.op, node.name, target, *arguments, lines, encode(meta)])
    # One document each, so that a node is there when those after it name it.
    return "\n".join(map(json.dumps, [list(encode.strings), *nodes]))


def graph_from_text(text: str, functions: FunctionTable = FUNCTIONAL) -> fx.Graph:
    """Rebuilds a graph from `graph_to_text`, with fake tensors of the active mode.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: It is not what `graph_to_text` makes, or
            has a name that is not known here.
    """
    strings, *lines = text.split("\n")
    stack_traces = json.loads(strings)
    graph, nodes = fx.Graph(), list[fx.Node]()
    decode = json.JSONDecoder(object_hook=_decoder(nodes, functions)).decode
    for line in lines:
        op, name, target, args, kwargs, stack_trace, meta = decode(line)
        _check_node(op, target, kwargs, functions)
        node = graph.create_node(op, target, args, kwargs, name)
        if node.name != name:
            raise ValueError(f"node {name!r} was renamed to {node.name!r}")
        node.meta.update(meta)
        if stack_trace is not None:
            node.meta["stack_trace"] = stack_traces[stack_trace]
        nodes.append(node)
    return graph


def pack_static(gm: fx.GraphModule) -> dict[str, bytes]:
    """Serializes a static-shape graph and its constants as named byte strings.

    Fake tensors get memory of their own, also those that are views of others.

    Args:
        gm: The graph; besides functions it reads constants.

    Returns:
        Parts by name, of which `unpack_static` makes the graph again.

    Raises:
        UnserializableError: A size is symbolic, or something is no tensor of numbers or has no
            name.
    """
    from dynamo_backends._torch_private.precompile import KEPT

    text = graph_to_text(gm.graph, kept=KEPT)
    names = {node.target for node in gm.graph.nodes if node.op == "get_attr"}
    strides, data = _pack_constants({name: getattr(gm, name, None) for name in sorted(names)})
    return {_GRAPH: text.encode(), _CONSTANTS: data, _STRIDES: json.dumps(strides).encode()}


def unpack_static(parts: Mapping[str, bytes]) -> fx.GraphModule:
    """Rebuilds the graph that `pack_static` serialized, in torch's current fake mode.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: See `graph_from_text`.
    """
    from dynamo_backends._torch_private.precompile import mode_of_compilation

    with mode_of_compilation():
        graph = graph_from_text(parts[_GRAPH].decode())
    root = torch.nn.Module()
    constants = _unpack_constants(parts[_CONSTANTS], json.loads(parts[_STRIDES]))
    for name, constant in constants.items():
        root.register_buffer(name, constant)
    return lazy_graph_module(root, graph)


def _check_node(op: str, target: Any, kwargs: Mapping[str, Any], functions: FunctionTable) -> None:
    """Raises where a node is none of such a graph, or has more than names in its code."""
    if op not in _OPS and not (op == "call_method" and functions.calls_methods):
        raise ValueError(f"a functional graph cannot contain a node with op {op!r}")
    is_call = op == "call_function"
    if callable(target) is not is_call or not (is_call or str(target).isidentifier()):
        raise ValueError(f"unsupported node: {op} of {target!r}")
    if not all(map(str.isidentifier, kwargs)):
        raise ValueError(f"unsupported keyword arguments: {list(kwargs)}")


def _pack_constants(constants: Mapping[str, Any]) -> tuple[dict[str, list[int]], bytes]:
    """Returns the strides of tensors, and what they hold in row-major order."""
    from safetensors.torch import save

    with disable_current_modes():
        for name, value in constants.items():
            if type(value) is not Tensor or "." in name or not _is_plain(value):
                raise UnserializableError(f"an attribute {name} that is not a plain tensor")
        strides = {name: list(tensor.stride()) for name, tensor in constants.items()}
        return strides, save({name: tensor.contiguous() for name, tensor in constants.items()})


def _unpack_constants(data: bytes, strides: Mapping[str, list[int]]) -> dict[str, Tensor]:
    from safetensors.torch import load

    with disable_current_modes():
        dense = load(data)
        return {
            name: torch.empty_strided(dense[name].shape, stride, dtype=dense[name].dtype).copy_(
                dense[name]
            )
            for name, stride in strides.items()
        }


def _is_plain(tensor: Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.requires_grad:
        return False
    # Strides are preserved of those tensors alone that have no gaps and no overlaps.
    return not has_conj_or_neg_bit(tensor) and torch.empty_like(tensor).stride() == tensor.stride()


class _Encoder:
    """Values as JSON: plain ones as they are, lists as lists, others as {kind: content}.

    Args:
        places: Places of the nodes in the graph.
        functions: See `graph_to_text`.

    Attributes:
        strings: Long texts, each of which is written once, with their places.
    """

    def __init__(self, places: Mapping[fx.Node, int], functions: FunctionTable):
        self._places = places
        self._functions = functions
        self.strings: dict[str, int] = {}

    def shared(self, text: str | None) -> int | None:
        """Returns the place of a text among the strings."""
        return None if text is None else self.strings.setdefault(text, len(self.strings))

    def __call__(self, value: Any) -> Any:
        """Returns one unpacked value.

        Raises:
            UnserializableError: It has no form.
        """
        value = self._functions.plain(value)
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind is complex:
            return {"complex": [repr(value.real), repr(value.imag)]}
        if isinstance(value, fx.Node):
            return {"node": self._places[value]}
        if isinstance(value, list):
            return [self(item) for item in value]
        if kind in (tuple, torch.Size):
            return {"tuple": [self(item) for item in value]}
        if isinstance(value, dict):
            return {"dict": [[self(key), self(item)] for key, item in value.items()]}
        if kind is slice:
            return {"slice": [self(end) for end in (value.start, value.stop, value.step)]}
        return self._named(value)

    def _named(self, value: Any) -> Any:
        if isinstance(value, OpOverload):
            names = value.namespace, value.overloadpacket.__name__, value._overloadname
            return {"operator": _PARTS.join(names)}
        if isinstance(value, FakeTensor):
            return {"fake": _looks(value)}
        if isinstance(value, _SETTINGS):
            return {"torch": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if value is ...:
            return {"ellipsis": None}
        if type(value).__module__ == _DESCRIPTORS:
            fields = {f.name: self(getattr(value, f.name)) for f in dataclasses.fields(value)}
            return {"descriptor": [type(value).__name__, list(fields.items())]}
        if callable(value) and (name := self._functions.name_of(value)) is not None:
            return {"function": name}
        raise UnserializableError(f"a {type(value).__name__} in a graph with static sizes")


def _decoder(nodes: list[fx.Node], functions: FunctionTable) -> Callable[[dict[str, Any]], Any]:
    """Returns what makes a value again of {kind: content}, whose content was made before."""
    kinds: dict[str, Callable[[Any], Any]] = {
        **_DECODERS,
        "node": nodes.__getitem__,
        "function": functions.named,
    }

    def decode(form: dict[str, Any]) -> Any:
        ((kind, content),) = form.items()
        return kinds[kind](content)

    return decode


@functools.cache
def _operator(name: str) -> OpOverload:
    op: Any = torch.ops
    for part in name.split(_PARTS):
        op = getattr(op, part, None)
    if not isinstance(op, OpOverload):
        raise TypeError(
            f"the graph calls {name}, which is not registered in this process; import the package "
            "that registers it"
        )
    return op


@functools.cache
def _setting(name: str) -> Any:
    value = getattr(torch, name)
    if not isinstance(value, _SETTINGS):
        raise TypeError(f"torch.{name} is not a dtype, layout or memory format")
    return value


def _descriptor(content: Any) -> Any:
    descriptors = importlib.import_module(_DESCRIPTORS)
    name, fields = content
    kind = getattr(descriptors, name)
    kinds = descriptors.AOTInput, descriptors.AOTOutput
    if not (isinstance(kind, type) and issubclass(kind, kinds)):
        raise TypeError(f"{name} is not a method descriptor")
    return kind(**dict(fields))


def _looks(tensor: FakeTensor) -> list[Any]:
    if tensor.layout != torch.strided or has_conj_or_neg_bit(tensor):
        raise UnserializableError(
            "a tensor that is not strided, or whose conjugate or negative bit is set"
        )
    size, stride, offset = list(tensor.shape), list(tensor.stride()), tensor.storage_offset()
    if not all(type(n) is int for n in (*size, *stride, offset)):
        raise UnserializableError("a SymInt in a graph with static sizes")
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    dtype, device = str(tensor.dtype).removeprefix("torch."), str(tensor.device)
    return [size, stride, offset, dtype, device, tensor.requires_grad, is_parameter]


def _fake(looks: list[Any]) -> Tensor:
    """Makes the fake tensor that was serialized; needs an active fake mode."""
    size, stride, offset, dtype, device, requires_grad, is_parameter = looks
    dtype = _setting(dtype)
    if offset:
        span = sum((n - 1) * step for n, step in zip(size, stride, strict=True) if n) + 1
        memory = torch.empty(offset + span, dtype=dtype, device=device)
        tensor = memory.as_strided(size, stride, offset)
    else:
        tensor = torch.empty_strided(size, stride, dtype=dtype, device=device)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "float": float,
    "complex": lambda parts: complex(*map(float, parts)),
    "tuple": tuple,
    "dict": dict,
    "slice": lambda ends: slice(*ends),
    "operator": _operator,
    "fake": _fake,
    "torch": _setting,
    "device": functools.cache(torch.device),
    "ellipsis": lambda _: ...,
    "descriptor": _descriptor,
}

"""Functional graphs of static sizes as JSON and safetensors, for the disk.

Reading one runs nothing that it names: calls are operators that torch knows, and tensors are data.
`precompile.pack` has other graphs, too, for processes that trust each other: it is a pickle.

| what | checked |
|---|---|
| `torch._subclasses.FakeTensor`, made by factories under its mode | 2.13 |
| `torch._ops.OpOverload`: `namespace`, `_overloadname`, `overloadpacket` | 2.13 |
| `torch._functorch._aot_autograd.descriptors`: frozen dataclasses | 2.11+ |
"""

import dataclasses
import functools
import json
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd import descriptors
from torch._ops import OpOverload
from torch._subclasses import FakeTensor

from dynamo_backends._torch_private.graphs import lazy_graph_module
from dynamo_backends._torch_private.precompile import KEPT, mode_of_compilation
from dynamo_backends._torch_private.tensors import is_lazy
from dynamo_backends._torch_private.tracing import disable_current_modes

_GRAPH, _CONSTANTS = "graph", "constants"
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {"getitem": operator.getitem}
"""What a functional graph calls besides operators."""

_SETTINGS = (torch.dtype, torch.layout, torch.memory_format)
_DESCRIPTORS = (descriptors.AOTInput, descriptors.AOTOutput)
_PARTS = "."  # between the parts of an operator's name


class UnserializableError(Exception):
    """A graph has something that this form cannot express; the message says what."""


def pack_static(gm: fx.GraphModule) -> dict[str, bytes]:
    """Returns a functional graph with its fake tensors, as data, without the user's modules.

    Fake tensors get memory of their own, also those that are views of others.

    Args:
        gm: The graph; besides functions it reads constants.

    Returns:
        Parts by name, of which `unpack_static` makes the graph again.

    Raises:
        UnserializableError: A size is symbolic, or something is no tensor of numbers or has no
            name.
    """
    encoder = _Encoder({node: i for i, node in enumerate(gm.graph.nodes)})
    constants: dict[str, Any] = {}
    nodes = []
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            constants[node.target] = getattr(gm, node.target, None)
        target = encoder(node.target) if node.op == "call_function" else node.target
        meta = {key: node.meta[key] for key in KEPT if key in node.meta}
        lines = encoder.shared(meta.pop("stack_trace", None))
        kwargs = encoder(dict(node.kwargs))
        nodes.append([node.op, node.name, target, encoder(node.args), kwargs, lines, encoder(meta)])
    strides, data = _pack_constants(constants)
    # One document each, so that a node is there when those after it name it.
    head = json.dumps([list(encoder.strings), strides])
    return {_GRAPH: "\n".join([head, *map(json.dumps, nodes)]).encode(), _CONSTANTS: data}


def unpack_static(parts: Mapping[str, bytes]) -> fx.GraphModule:
    """The graph that was packed, with fake tensors of the mode in which torch compiles.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: It is not what `pack_static` makes, or has
            a name that is not known here.
    """
    head, *lines = parts[_GRAPH].decode().split("\n")
    strings, strides = json.loads(head)
    graph, nodes = fx.Graph(), list[fx.Node]()
    decode = json.JSONDecoder(object_hook=_decoder(nodes)).decode
    with mode_of_compilation():
        for line in lines:
            op, name, target, args, kwargs, stack_trace, meta = decode(line)
            _check_node(op, target, kwargs)
            node = graph.create_node(op, target, args, kwargs, name)
            if node.name != name:
                raise ValueError(f"{name!r} has become {node.name!r}")
            node.meta.update(meta)
            if stack_trace is not None:
                node.meta["stack_trace"] = strings[stack_trace]
            nodes.append(node)
    root = torch.nn.Module()
    for name, constant in _unpack_constants(parts[_CONSTANTS], strides).items():
        root.register_buffer(name, constant)
    return lazy_graph_module(root, graph)


def _check_node(op: str, target: Any, kwargs: Mapping[str, Any]) -> None:
    """Raises where a node is none of a functional graph, or has more than names in its code."""
    if op not in ("placeholder", "call_function", "get_attr", "output"):
        raise ValueError(f"a node of a functional graph is no {op!r}")
    is_call = op == "call_function"
    if callable(target) is not is_call or not (is_call or str(target).isidentifier()):
        raise ValueError(f"{op} of {target!r}")
    if not all(map(str.isidentifier, kwargs)):
        raise ValueError(f"arguments {list(kwargs)}")


def _pack_constants(constants: Mapping[str, Any]) -> tuple[dict[str, list[int]], bytes]:
    """Returns the strides of tensors, and what they hold in row-major order."""
    from safetensors.torch import save

    with disable_current_modes():
        for name, value in constants.items():
            if type(value) is not Tensor or "." in name or not _is_plain(value):
                raise UnserializableError(f"{name} is no plain tensor of the graph's own")
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
    return not is_lazy(tensor) and torch.empty_like(tensor).stride() == tensor.stride()


class _Encoder:
    """Values as JSON: plain ones as they are, lists as lists, others as {kind: content}.

    Args:
        places: Of the nodes in the graph.

    Attributes:
        strings: Long texts, each of which is written once, with their places.
    """

    def __init__(self, places: Mapping[fx.Node, int]):
        self._places = places
        self.strings: dict[str, int] = {}

    def shared(self, text: str | None) -> int | None:
        """Returns the place of a text among the strings."""
        return None if text is None else self.strings.setdefault(text, len(self.strings))

    def __call__(self, value: Any) -> Any:
        """Returns one value.

        Raises:
            UnserializableError: It has no form.
        """
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
        if kind is tuple:
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
        if isinstance(value, _DESCRIPTORS):
            fields = {f.name: self(getattr(value, f.name)) for f in dataclasses.fields(value)}
            return {"descriptor": [type(value).__name__, list(fields.items())]}
        for name, function in _FUNCTIONS.items():
            if value is function:
                return {"function": name}
        raise UnserializableError(f"a {type(value).__name__} in a graph of static sizes")


def _decoder(nodes: list[fx.Node]) -> Callable[[dict[str, Any]], Any]:
    """Returns what makes a value again of {kind: content}, whose content was made before."""
    kinds: dict[str, Callable[[Any], Any]] = {**_DECODERS, "node": nodes.__getitem__}

    def decode(form: dict[str, Any]) -> Any:
        ((kind, content),) = form.items()
        return kinds[kind](content)

    return decode


@functools.cache
def _operator(name: str) -> OpOverload:
    op: Any = torch.ops
    for part in name.split(_PARTS):
        op = getattr(op, part)
    if not isinstance(op, OpOverload):
        raise TypeError(f"{name} is no operator")
    return op


@functools.cache
def _setting(name: str) -> Any:
    value = getattr(torch, name)
    if not isinstance(value, _SETTINGS):
        raise TypeError(f"torch.{name} is no dtype, layout or memory format")
    return value


def _descriptor(content: Any) -> Any:
    name, fields = content
    kind = getattr(descriptors, name)
    if not (isinstance(kind, type) and issubclass(kind, _DESCRIPTORS)):
        raise TypeError(f"{name} is no descriptor")
    return kind(**dict(fields))


def _looks(tensor: FakeTensor) -> list[Any]:
    if tensor.layout != torch.strided or is_lazy(tensor):
        raise UnserializableError("a tensor that is not strided, or is read in another way")
    size, stride, offset = list(tensor.shape), list(tensor.stride()), tensor.storage_offset()
    if not all(type(n) is int for n in (*size, *stride, offset)):
        raise UnserializableError("a SymInt in a graph of static sizes")
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    dtype, device = str(tensor.dtype).removeprefix("torch."), str(tensor.device)
    return [size, stride, offset, dtype, device, tensor.requires_grad, is_parameter]


def _fake(looks: list[Any]) -> Tensor:
    """Called under a fake mode."""
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
    "function": _FUNCTIONS.__getitem__,
    "fake": _fake,
    "torch": _setting,
    "device": functools.cache(torch.device),
    "ellipsis": lambda _: ...,
    "descriptor": _descriptor,
}

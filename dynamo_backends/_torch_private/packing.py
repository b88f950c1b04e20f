"""Functional graphs of static sizes as bytes, for the disk.

`precompile.pack` does so for all graphs, in ten times the time.

| what | checked |
|---|---|
| `torch._subclasses.FakeTensor`, made by factories under its mode | 2.13 |
| `torch._ops.OpOverload`: `namespace`, `_overloadname`, `overloadpacket` | 2.13 |
| `torch.fx.node.map_aggregate` | 2.13 |
"""

import io
import pickle
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.fx.node import map_aggregate

from dynamo_backends._torch_private.graphs import lazy_graph_module
from dynamo_backends._torch_private.precompile import KEPT, mode_of_compilation
from dynamo_backends._torch_private.tensors import is_lazy


class _Packed(NamedTuple):
    nodes: bytes
    constants: dict[str, Tensor]


class _At:
    """A node, by its place in the graph."""

    __slots__ = ("place",)

    def __init__(self, place: int):
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return _At, (self.place,)


def pack_static(gm: fx.GraphModule) -> bytes:
    """A functional graph with its fake tensors, as bytes, without the user's modules.

    Fake tensors get memory of their own, also those that are views of others.

    Args:
        gm: The graph; besides functions it reads constants.

    Raises:
        PicklingError: A size is symbolic, or something is no tensor of numbers or has no name.
    """
    places = {node: place for place, node in enumerate(gm.graph.nodes)}
    constants: dict[str, Tensor] = {}
    strings: dict[str, str] = {}
    nodes = []
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            constants[node.target] = _constant(gm, node.target)
        meta = {key: node.meta[key] for key in KEPT if key in node.meta}
        lines = meta.get("stack_trace")
        if lines is not None:  # equal ones are written once
            meta["stack_trace"] = strings.setdefault(lines, lines)
        nodes.append((node.op, node.name, node.target, node.args, node.kwargs, meta))
    file = io.BytesIO()
    _Packer(file, places).dump(nodes)
    return pickle.dumps(_Packed(file.getvalue(), constants))


def unpack_static(data: bytes) -> fx.GraphModule:
    """The graph that was packed, with fake tensors of the mode in which torch compiles.

    Raises:
        ValueError: A name cannot be had again.
    """
    packed = pickle.loads(data)
    with mode_of_compilation():
        described = pickle.loads(packed.nodes)
    graph, nodes = fx.Graph(), list[fx.Node]()

    def node_at(x: Any) -> Any:
        return nodes[x.place] if type(x) is _At else x

    for op, name, target, args, kwargs, meta in described:
        args, kwargs = map_aggregate(args, node_at), map_aggregate(kwargs, node_at)
        node = graph.create_node(op, target, args, kwargs, name)
        if node.name != name:
            raise ValueError(f"{name!r} has become {node.name!r}")
        node.meta.update(meta)
        nodes.append(node)
    root = torch.nn.Module()
    for name, value in packed.constants.items():
        root.register_buffer(name, value)
    return lazy_graph_module(root, graph)


def _constant(gm: fx.GraphModule, name: str) -> Tensor:
    value = getattr(gm, name, None)
    if type(value) is not Tensor or "." in name:
        raise pickle.PicklingError(f"{name} is no tensor of the graph's own")
    return value


class _Packer(pickle.Pickler):
    """Writes nodes by their places, operators by their names, and fake tensors by their looks."""

    def __init__(self, file: io.BytesIO, places: dict[fx.Node, int]):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._places = places

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, fx.Node):
            return _At, (self._places[obj],)
        if isinstance(obj, OpOverload):
            return _operator, (obj.namespace, obj.overloadpacket.__name__, obj._overloadname)
        if isinstance(obj, FakeTensor):
            return _fake, _looks(obj)
        if isinstance(obj, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, fx.GraphModule)):
            raise pickle.PicklingError(f"a {type(obj).__name__} in a graph of static sizes")
        return NotImplemented


def _operator(namespace: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _looks(tensor: FakeTensor) -> tuple[Any, ...]:
    if tensor.layout != torch.strided or is_lazy(tensor):
        raise pickle.PicklingError("a tensor that is not strided, or is read in another way")
    sizes = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return *sizes, tensor.dtype, tensor.device, tensor.requires_grad, is_parameter


def _fake(
    size: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
    is_parameter: bool,
) -> Tensor:
    """Called under a fake mode."""
    if offset:
        span = sum((n - 1) * step for n, step in zip(size, stride, strict=True) if n) + 1
        memory = torch.empty(offset + span, dtype=dtype, device=device)
        tensor = memory.as_strided(size, stride, offset)
    else:
        tensor = torch.empty_strided(size, stride, dtype=dtype, device=device)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor

"""From a graph to the program of a fusion, and whether a single call can be in one."""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.errors import CompileError
from dynamo_backends.nvfuser import vendor
from dynamo_backends.nvfuser.dtypes import NAMES, memory_order, stride_order
from dynamo_backends.nvfuser.lowering.registry import Unsupported, lookup, lower, lower_call
from dynamo_backends.nvfuser.program import FusionProgram
from dynamo_backends.nvfuser.recorder import Recorder, Value
from dynamo_backends.nvfuser.vendor import NvFuserModule

MAX_DIMS = 8
"""Largest number of dimensions of tensors in nvFuser's kernels."""


@dataclass(frozen=True)
class LoweredFusion:
    """A graph's fusion, and how it is called.

    Attributes:
        program: The fusion.
        inputs: Positions of the graph's inputs that it reads.
        device: Where it runs.
        outputs: For each output of the graph: which result of the fusion it is, or, if it is one of
            the graph's inputs, that input's position as a negative number, -1 for the first.
    """

    program: FusionProgram
    inputs: tuple[int, ...]
    device: torch.device
    outputs: tuple[int, ...]


def lower_graph(graph: Graph, symbolic: bool) -> LoweredFusion:
    """Returns the program of a graph of supported calls.

    Args:
        graph: With static shapes.
        symbolic: Whether it shall serve other sizes, too.

    Raises:
        LoweringError: A call cannot be lowered.
        CompileError: Nothing says on which device it runs.
    """
    device = _device(graph)
    recorder = Recorder(symbolic)
    read = [i for i, p in enumerate(graph.placeholders) if _is_read(p)]
    places = [graph.placeholders[i] for i in read]
    known = {p: recorder.input(p.meta["val"]) for p in places}
    values = lower(graph.module.graph, known, recorder)
    results, outputs = _results(graph, values, recorder)
    return LoweredFusion(recorder.program(results), tuple(read), device, outputs)


def _is_read(place: fx.Node) -> bool:
    calls = any(user.op == "call_function" for user in place.users)
    return calls and isinstance(place.meta["val"], Tensor)


def _device(graph: Graph) -> torch.device:
    """Returns the one device that the inputs are on."""
    found = {
        n.meta["val"].device
        for n in graph.placeholders
        if isinstance(n.meta["val"], Tensor) and n.meta["val"].device.type == vendor.TYPE
    }
    if len(found) > 1:
        raise CompileError(f"the block's inputs are on {len(found)} devices")
    if not found:
        raise CompileError("the block has no CUDA input, so the device for nvFuser is unknown")
    return found.pop()


def _results(
    graph: Graph, values: dict[fx.Node, Any], recorder: Recorder
) -> tuple[list[Value], tuple[int, ...]]:
    """Returns what the fusion returns, each value once, and `LoweredFusion.outputs`."""
    positions = {p: i for i, p in enumerate(graph.placeholders)}
    results: dict[fx.Node, Value] = {}
    for node in graph.outputs:
        if node not in positions and node not in results:
            results[node] = _stored(values[node], node.meta["val"], recorder)
    order = {node: i for i, node in enumerate(results)}
    outputs = (-1 - positions[n] if n in positions else order[n] for n in graph.outputs)
    return list(results.values()), tuple(outputs)


def _stored(value: Value, promised: Tensor, recorder: Recorder) -> Value:
    """An output in the order of dimensions in memory that torch promises, as a result of its own.

    nvFuser would choose an order by the inputs'. An output that is an input, or that another output
    is, too, would share its memory.
    """
    recorder.origin = ""
    if value.ndim < 2:
        return value.unary("set")
    order = stride_order(memory_order(promised.shape, promised.stride()))
    return recorder.tensor("stride_order", (value, order), value.shape, value.dtype)


def why_not(node: fx.Node, nvfuser: NvFuserModule | None) -> str | None:
    """Returns why a call cannot be part of a fusion; None if it can.

    Args:
        node: The call.
        nvfuser: Which has to have the operations; None: do not ask.
    """
    if lookup(node.target) is None:
        return "it has no lowering to nvFuser"
    for value in (*_read(node), *_made(node)):
        reason = _unfit(value)
        if reason is not None:
            return reason
    recorder = Recorder()
    try:
        values = {n: _alone(n, recorder) for n in node.all_input_nodes}
        lower_call(node, values, recorder)
    except Unsupported as reason:
        return str(reason)
    absent = [op for op in sorted(recorder.operations) if nvfuser and not nvfuser.has(op)]
    if absent:
        return f"this version of nvFuser has no {absent[0]!r}"
    return _elsewhere(node)


def _alone(node: fx.Node, recorder: Recorder) -> Any:
    """Records an operand of a call that is tried by itself as an input."""
    value = node.meta["val"]
    if isinstance(value, Tensor):
        return recorder.input(value)
    raise Unsupported("an input is not a tensor")


def _read(node: fx.Node) -> list[Tensor]:
    """Returns the tensors that a call reads."""
    values = [n.meta.get("val") for n in node.all_input_nodes]
    return [v for v in values if isinstance(v, Tensor)]


def _made(node: fx.Node) -> list[Tensor]:
    """Returns the results of a call that somebody reads."""
    value = node.meta.get("val")
    if not isinstance(value, list | tuple):
        return [value] if isinstance(value, Tensor) else []
    picked = {user.args[1] for user in node.users if user.target is operator.getitem}
    return [v for i, v in enumerate(value) if i in picked and isinstance(v, Tensor)]


def _unfit(value: Tensor) -> str | None:
    if str(value.layout) != "torch.strided":
        return f"nvFuser has no {value.layout} tensors"
    if value.dtype not in NAMES:
        return f"nvFuser does not compute with {value.dtype}"
    if any(not isinstance(size, int) for size in value.shape):
        return "a size depends on data"
    if not value.numel():
        return "a tensor has no elements"
    if value.ndim > MAX_DIMS:
        return f"a tensor has {value.ndim} dimensions, and nvFuser takes {MAX_DIMS}"
    return vendor.why_unreadable(value)


def _elsewhere(node: fx.Node) -> str | None:
    """Returns why nvFuser would not leave a result where torch promises it."""
    if all(v.device.type == vendor.TYPE for v in _made(node)):
        return None
    return "its result is a scalar on the CPU"

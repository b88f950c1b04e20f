"""Keeps indices within their dimension.

Eager raises for an index that is out of range. Compiled code of IREE does not look: it would read,
or write, whatever memory lies there. So every index is clamped, as XLA does.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends.graph.shape_propagation import ShapeInference
from dynamo_backends.interface.errors import CompileError

aten = torch.ops.aten


@dataclass(frozen=True)
class Index:
    """An index tensor among the arguments of a call.

    Attributes:
        node: The tensor.
        size: Size of the dimension that it goes along.
        element: Its place in a list of indices; None where it is an argument itself.
    """

    node: fx.Node
    size: int
    element: int | None = None


@dataclass(frozen=True)
class _Rule:
    """The places of index tensors in a kind of call.

    Attributes:
        place: Position of the argument.
        find: From a call to the index tensors in that argument.
    """

    place: int
    find: Callable[[fx.Node], Iterator[Index]]


def _along_first(node: fx.Node) -> Iterator[Index]:
    yield Index(_node(node.args[1]), _shape(node.args[0])[0])


def _along_dim(node: fx.Node) -> Iterator[Index]:
    shape = _shape(node.args[0])
    dim: Any = node.args[1]
    yield Index(_node(node.args[2]), shape[dim] if shape else 1)


def _along_each(node: fx.Node) -> Iterator[Index]:
    shape = _shape(node.args[0])
    indices: Any = node.args[1]
    for dim, index in enumerate(indices):
        if index is not None:
            yield Index(index, shape[dim], dim)


_RULES: dict[str, _Rule] = {
    "embedding.default": _Rule(1, _along_first),
    "index.Tensor": _Rule(1, _along_each),
    "index_put.default": _Rule(1, _along_each),
    **{
        name: _Rule(2, _along_dim)
        for name in (
            "gather.default",
            "index_add.default",
            "index_select.default",
            "scatter.reduce",
            "scatter.src",
            "scatter.value",
            "scatter.value_reduce",
            "scatter_add.default",
            "scatter_reduce.two",
        )
    },
}

_WRITES = frozenset(_RULES) - {
    "embedding.default", "index.Tensor", "gather.default", "index_select.default",
}  # fmt: skip

_POSITIONS = frozenset({"index", "indices", "offsets", "target", "input_lengths"})


def why_unguarded(node: fx.Node) -> str | None:
    """Returns why a call's indices cannot be clamped; None if they can."""
    target: Any = node.target
    rule = _RULES.get(_name(node))
    if rule is not None:
        masks = any(index.node.meta["val"].dtype == torch.bool for index in rule.find(node))
        return "its index is a boolean mask" if masks else None
    if any(a.name in _POSITIONS and "Tensor" in str(a.type) for a in target._schema.arguments):
        return "IREE's compiled code does not check for out-of-range indices"
    return None


def clamp_indices(graph: fx.Graph) -> None:
    """Wraps negative indices and clamps all into their dimension, in place.

    Dimensions that are counted from the last one are counted from the first: the compiler breaks
    down at others.
    """
    infer = ShapeInference()
    for node in list(graph.nodes):
        rule = _RULES.get(_name(node)) if node.op == "call_function" else None
        dim: Any = node.args[1] if rule is not None else None
        if isinstance(dim, int) and dim < 0:
            node.update_arg(1, dim + max(len(_shape(node.args[0])), 1))
        for index in list(rule.find(node)) if rule is not None else ():
            assert rule is not None
            with graph.inserting_before(node):
                within: Any = _within(graph, index, infer)
            if index.element is not None:
                elements: Any = list(node.args[rule.place])
                elements[index.element] = within
                within = elements
            node.update_arg(rule.place, within)


def require_fixed(graph: fx.Graph, others: Mapping[fx.Node, Any]) -> None:
    """Raises `CompileError` if a call with indices needs sizes that are known.

    No index goes along a dimension whose size varies. Nor may the number of elements that are
    written vary: IREE 3.13 refuses most of such scatters (a stack allocation of unknown size), and
    compiles those whose values another call reads, too, for one row.

    Args:
        graph: The graph.
        others: What its nodes are at other sizes (see `graph.symbols.elsewhere`).
    """
    for node in graph.nodes:
        rule = _RULES.get(_name(node)) if node.op == "call_function" else None
        if rule is None:
            continue
        if _varies(_node(node.args[0]), others):
            raise CompileError(f"{node.name!r} indexes a dimension of dynamic size")
        if _name(node) in _WRITES and any(_varies(n, others) for n in node.all_input_nodes):
            raise CompileError(f"{node.name!r} writes a dynamic number of elements")


def _varies(node: fx.Node, others: Mapping[fx.Node, Any]) -> bool:
    return isinstance(others[node], Tensor) and _shape(node) != others[node].shape


def _within(graph: fx.Graph, index: Index, infer: ShapeInference) -> fx.Node:
    """Returns the same index from 0 to below the dimension's size."""
    call = functools.partial(infer.insert_call, graph)
    node, size = index.node, index.size
    negative = call(aten.lt.Scalar, node, 0)
    around = call(aten.where.self, negative, call(aten.add.Tensor, node, size), node)
    return call(aten.clamp.default, around, 0, max(size - 1, 0))


def _name(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.")


def _node(argument: Any) -> fx.Node:
    assert isinstance(argument, fx.Node)
    return argument


def _shape(argument: Any) -> torch.Size:
    value: Tensor = _node(argument).meta["val"]
    return value.shape

"""Sizes that are given where an operator takes any number (see `graph.sizes`)."""

import contextlib
import itertools
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import detect_fake_mode
from dynamo_backends.graph.canonicalize import SPELLINGS
from dynamo_backends.graph.sizes import SIZES, STRIDES, Size, sizes_in

aten = torch.ops.aten

# Of their numbers sizes follow, or nothing but their value.
_COUNTS = frozenset(
    {aten.arange.default, aten.arange.start, aten.arange.start_step, aten.scalar_tensor.default}
)

_FORGOTTEN = "forgotten_sizes"
"""Key in the `meta` of an output node: there are numbers in the graph that follow from sizes."""


def settle_numbers(graph: fx.Graph) -> None:
    """Settles sizes that are given where an operator of a graph takes any number.

    Type promotion in torch knows the built-in types only. Where an operator takes a tensor, a
    number becomes a tensor, if that is promoted alike; else the size is forgotten (see
    `has_forgotten`).
    """
    for node in [n for n in graph.nodes if n.op == "call_function"]:
        if node.target in _COUNTS or not sizes_in((node.args, node.kwargs)):
            continue
        node.target = SPELLINGS.get(node.target, node.target)
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            continue
        types = {a.name: str(a.type) for a in schema.arguments}
        names = [*itertools.islice(types, len(node.args)), *node.kwargs]
        values = (*node.args, *node.kwargs.values())
        settled = [_settled(v, types[n], node) for n, v in zip(names, values, strict=True)]
        node.args = tuple(settled[: len(node.args)])
        node.kwargs = dict(zip(node.kwargs, settled[len(node.args) :], strict=True))


def _settled(value: Any, type_name: str, node: fx.Node) -> Any:
    if not isinstance(value, Size) or "int" in type_name:
        return value
    result = node.meta.get("val")
    if type_name == "Tensor" and isinstance(result, Tensor) and _is_promoted_alike(node):
        return _as_tensor(value, node, result)
    note_forgotten(node.graph)
    return int(value)


def _is_promoted_alike(node: fx.Node) -> bool:
    """Whether a tensor without dimensions in the place of a number leaves all dtypes as they are.

    It does not beside other tensors without dimensions whose integers are narrower.
    """
    scalar = torch.empty((), dtype=torch.int64)
    others = [torch.empty((1,) * min(x.ndim, 1), dtype=x.dtype) for x in _tensors(node)]
    return all(torch.result_type(x, scalar) == torch.result_type(x, 1) for x in others)


def _tensors(node: fx.Node) -> list[Tensor]:
    values = [source.meta.get("val") for source in node.all_input_nodes]
    return [x for x in values if isinstance(x, Tensor)]


def _as_tensor(size: Size, node: fx.Node, beside: Tensor) -> fx.Node:
    """A call that makes a tensor of a size, before another call."""
    with node.graph.inserting_before(node):
        made = node.graph.call_function(
            aten.scalar_tensor.default, (size,), {"dtype": torch.int64, "device": beside.device}
        )
    mode = detect_fake_mode([beside])
    made.meta = {SIZES: (), STRIDES: ()}
    with mode if mode is not None else contextlib.nullcontext():
        made.meta["val"] = torch.empty((), dtype=torch.int64, device=beside.device)
    return made


def note_forgotten(graph: fx.Graph) -> None:
    """Notes that a number in a graph follows from sizes of one call, and does not say so."""
    graph.output_node().meta[_FORGOTTEN] = True


def has_forgotten(graph: fx.Graph) -> bool:
    """Whether numbers in a graph follow from sizes of one call, and do not say so."""
    return _FORGOTTEN in graph.output_node().meta

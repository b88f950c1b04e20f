"""Operators whose results IREE computes in the memory of their first operand.

With IREE 3.13 that is the caller's memory, if the operand is an input of the program. So they get a
copy of it: a computation that gives the same numbers, which the compiler does not leave out.
"""

import functools
import math
from typing import Any

import torch
from torch import fx

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.graph.propagate import Inference

aten = torch.ops.aten

_OPERATORS = frozenset(
    {
        aten.index_add.default, aten.index_put.default, aten.scatter.reduce, aten.scatter.src,
        aten.scatter.value, aten.scatter.value_reduce, aten.scatter_add.default,
        aten.scatter_reduce.two, aten.sort.default, aten.topk.default,
    }
)  # fmt: skip

_NO_CALCULATIONS = frozenset(
    {aten._to_copy.default, aten.clone.default, aten.lift_fresh_copy.default}
)


def copy_inputs(graph: fx.Graph) -> None:
    """Puts copies of inputs before operators that would write to them, in place."""
    infer = Inference()
    for node in list(graph.nodes):
        source: Any = node.args[0] if node.target in _OPERATORS else None
        if source is not None and _is_input(source):
            with graph.inserting_before(node):
                node.update_arg(0, _copy(graph, source, infer))


def _is_input(node: fx.Node) -> bool:
    """Whether a tensor may be an input of the program, or a part of one."""
    while node.op == "call_function" and (_is_view(node.target) or node.target in _NO_CALCULATIONS):
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def _is_view(target: Any) -> bool:
    if not isinstance(target, OpOverload):
        return False
    return any(result.alias_info is not None for result in target._schema.returns)


def _copy(graph: fx.Graph, source: fx.Node, infer: Inference) -> fx.Node:
    """The same numbers; of booleans and complex numbers no copy is known."""
    call = functools.partial(infer.call, graph)
    dtype = source.meta["val"].dtype
    if dtype.is_floating_point:
        nan = call(aten.ne.Tensor, source, source)
        return call(aten.masked_fill.Scalar, source, nan, math.nan)
    if dtype.is_complex or dtype == torch.bool:
        return source
    odd = call(aten.bitwise_and.Scalar, source, 1)
    even = call(aten.bitwise_and.Scalar, source, 254 if dtype == torch.uint8 else -2)
    return call(aten.bitwise_or.Tensor, odd, even)

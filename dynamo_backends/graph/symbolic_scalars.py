"""Sizes, and floats of sizes, that are given where an operator takes any number."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from dynamo_backends.graph.canonicalize import SPELLINGS
from dynamo_backends.graph.graph import erase_unused_calls
from dynamo_backends.graph.shape_propagation import fake_mode_of_nodes
from dynamo_backends.graph.size_arithmetic import find_scalar_expressions
from dynamo_backends.graph.symbolic_sizes import (
    SIZES,
    STRIDES,
    FloatWithExpression,
    SizeWithExpression,
    collect_varying_sizes,
)
from dynamo_backends.interface.errors import CompileError

aten = torch.ops.aten

# Of their numbers sizes follow, or nothing but their value.
_COUNTS = frozenset(
    {aten.arange.default, aten.arange.start, aten.arange.start_step, aten.scalar_tensor.default}
)

_COMPARISONS = {
    getattr(aten, name).Scalar: getattr(aten, name).Tensor
    for name in ("eq", "ge", "gt", "le", "lt", "ne")
}
"""Overloads that take a number, each with the one that takes a tensor in its place."""

_FORGOTTEN = "forgotten_sizes"
"""Key in the `meta` of an output node: so often a number of sizes has become one of this call."""


def lower_symbolic_scalars(graph: fx.Graph) -> None:
    """Turns sizes used as plain numbers into tensors, or hardcodes them; in place.

    Type promotion in torch knows the built-in types only. Where an operator takes a tensor, a
    number becomes a tensor, if that is promoted alike; else the size is forgotten (see
    `has_hardcoded_sizes`).
    """
    _fold(graph)
    for node in [n for n in graph.nodes if n.op == "call_function"]:
        if not _has_numbers(node):
            continue
        if _is_float_of_sizes(node):
            value = node.meta["val"]
            node.replace_all_uses_with(_computed(node.args[0], node, value.dtype, value.device))
            graph.erase_node(node)
            continue
        node.target = SPELLINGS.get(node.target, node.target)
        if node.target in _COMPARISONS and _compare_with_tensor(node):
            continue
        schema = getattr(node.target, "_schema", None)
        types = {a.name: str(a.type) for a in schema.arguments} if schema is not None else {}
        names = [*itertools.islice(types, len(node.args)), *node.kwargs]
        if len(names) == len(node.args) + len(node.kwargs):
            values = (*node.args, *node.kwargs.values())
            settled = [_settled(v, types[n], node) for n, v in zip(names, values, strict=True)]
            node.args = tuple(settled[: len(node.args)])
            node.kwargs = dict(zip(node.kwargs, settled[len(node.args) :], strict=True))
    _forget_floats(graph)


def _fold(graph: fx.Graph) -> None:
    """Computes numbers that torch makes of sizes by many calls in the dtype of their results."""
    for node, number in find_scalar_expressions(graph).items():
        value = node.meta["val"]
        if isinstance(number, FloatWithExpression) and not is_computable_in_graph(number):
            continue
        if node.target is not aten.scalar_tensor.default or value.is_floating_point():
            made = _as_call(number, node, value.dtype, value.device)
            node.replace_all_uses_with(made)
            erase_unused_calls(graph, [node])


def _compare_with_tensor(node: fx.Node) -> bool:
    """Compares with a tensor instead of a number, if that is promoted alike; says whether it is.

    Whether torch traces a comparison with a size as one with a number or with a tensor depends on
    its version.
    """
    number = node.args[1]
    if isinstance(number, SizeWithExpression) and _is_promoted_alike(node, 1, torch.int64):
        made = _sized(number, node, node.meta["val"].device)
    elif isinstance(number, FloatWithExpression) and is_computable_in_graph(number):
        (compared,) = _tensors(node)
        dtype = torch.promote_types(compared.dtype, torch.float32)
        if not compared.is_floating_point() or not _is_promoted_alike(node, 1.0, dtype):
            return False
        made = _computed(number, node, dtype, compared.device)
    else:
        return False
    node.args = (node.args[0], made)
    node.target = _COMPARISONS[node.target]
    return True


def _forget_floats(graph: fx.Graph) -> None:
    """Makes numbers of one call of what is left: arguments, and results that nothing computes."""

    def forget(value: Any) -> Any:
        if isinstance(value, FloatWithExpression):
            note_hardcoded_size(graph)
            return float(value)
        return value

    def keep(value: Any) -> Any:
        return (
            value
            if isinstance(value, FloatWithExpression) and is_computable_in_graph(value)
            else forget(value)
        )

    for node in graph.nodes:
        settle = keep if node.op == "output" else forget
        node.args = fx.node.map_aggregate(node.args, settle)
        node.kwargs = fx.node.map_aggregate(node.kwargs, settle)


def _has_numbers(node: fx.Node) -> bool:
    """Returns whether a call is given numbers whose type matters, and that follow from sizes."""
    if node.target in _COUNTS and not any(isinstance(x, FloatWithExpression) for x in node.args):
        return False
    return bool(collect_varying_sizes((node.args, node.kwargs)))


def _settled(value: Any, type_name: str, node: fx.Node) -> Any:
    if not isinstance(value, SizeWithExpression | FloatWithExpression) or "int" in type_name:
        return value
    result = node.meta.get("val")
    if type_name == "Tensor" and isinstance(result, Tensor):
        made = _as_tensor(value, node, result)
        if made is not None:
            return made
    if isinstance(value, SizeWithExpression):
        note_hardcoded_size(node.graph)
        return int(value)
    return value


def _is_float_of_sizes(node: fx.Node) -> bool:
    """Returns whether a call makes a tensor of a number that calls can compute from sizes."""
    if node.target is not aten.scalar_tensor.default or not isinstance(
        node.args[0], FloatWithExpression
    ):
        return False
    return node.meta["val"].is_floating_point() and is_computable_in_graph(node.args[0])


def _as_tensor(
    number: SizeWithExpression | FloatWithExpression, node: fx.Node, result: Tensor
) -> fx.Node | None:
    """Makes a tensor of a number, as a node before another call; None if types would differ."""
    device = result.device
    if isinstance(number, SizeWithExpression):
        return _sized(number, node, device) if _is_promoted_alike(node, 1, torch.int64) else None
    if not result.is_floating_point() or not is_computable_in_graph(number):
        return None
    dtype = torch.promote_types(result.dtype, torch.float32)
    if not _is_promoted_alike(node, 1.0, dtype):
        return None
    return _computed(number, node, dtype, device)


def _as_call(
    number: SizeWithExpression | FloatWithExpression,
    before: fx.Node,
    dtype: torch.dtype,
    device: torch.device,
) -> fx.Node:
    if isinstance(number, FloatWithExpression):
        return _computed(number, before, dtype, device)
    sized = _sized(number, before, device)
    if dtype == torch.int64:
        return sized
    return _call(before, aten._to_copy.default, (sized,), {"dtype": dtype}, dtype, device)


def _computed(
    number: FloatWithExpression, before: fx.Node, dtype: torch.dtype, device: torch.device
) -> fx.Node:
    def of_size(size: SizeWithExpression) -> fx.Node:
        return _as_call(size, before, dtype, device)

    def call(function: Any, *args: Any) -> fx.Node:
        makes = function is aten.scalar_tensor.default
        kwargs = {"dtype": dtype, "device": device} if makes else {}
        return _call(before, function, args, kwargs, dtype, device)

    return emit_float_expression(number, of_size, call)


def _sized(size: SizeWithExpression, node: fx.Node, device: torch.device) -> fx.Node:
    dtype = torch.int64
    kwargs = {"dtype": dtype, "device": device}
    return _call(node, aten.scalar_tensor.default, (size,), kwargs, dtype, device)


def _call(
    before: fx.Node,
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
) -> fx.Node:
    """A call that makes a tensor without dimensions, before another call."""
    with before.graph.inserting_before(before):
        made = before.graph.call_function(function, args, kwargs)
    made.meta = {SIZES: (), STRIDES: ()}
    with fake_mode_of_nodes(before.graph.nodes):
        made.meta["val"] = torch.empty((), dtype=dtype, device=device)
    return made


def _is_promoted_alike(node: fx.Node, number: int | float, dtype: torch.dtype) -> bool:
    """Returns whether a 0-d tensor in place of a number leaves all dtypes unchanged.

    It does not beside other tensors without dimensions of narrower dtypes.
    """
    scalar = torch.empty((), dtype=dtype)
    others = [torch.empty((1,) * min(x.ndim, 1), dtype=x.dtype) for x in _tensors(node)]
    return all(torch.result_type(x, scalar) == torch.result_type(x, number) for x in others)


def _tensors(node: fx.Node) -> list[Tensor]:
    values = [source.meta.get("val") for source in node.all_input_nodes]
    return [x for x in values if isinstance(x, Tensor)]


def note_hardcoded_size(graph: fx.Graph) -> None:
    """Counts, in the output's `meta`, one more number hardcoded to this call's sizes."""
    meta = graph.output_node().meta
    meta[_FORGOTTEN] = meta.get(_FORGOTTEN, 0) + 1


def has_hardcoded_sizes(graph: fx.Graph) -> bool:
    """Returns whether any number was hardcoded to this call's sizes."""
    return _FORGOTTEN in graph.output_node().meta


def require_no_hardcoded_sizes(lowered: fx.Graph, graph: fx.Graph) -> None:
    """Raises `CompileError` if lowering hardcoded more sizes than `graph` had.

    Args:
        lowered: What a copy of the graph has become.
        graph: For concrete shapes; from one with symbolic shapes.
    """
    now, before = (g.output_node().meta.get(_FORGOTTEN, 0) for g in (lowered, graph))
    if now > before:
        raise CompileError("the traced graph depends on concrete sizes")


_FUNCTIONS = {
    "Add": aten.add.Tensor,
    "FloatPow": aten.pow.Tensor_Tensor,
    "FloatTrueDiv": aten.div.Tensor,
    "IntTrueDiv": aten.div.Tensor,
    "Mul": aten.mul.Tensor,
    "OpaqueUnaryFn_sqrt": aten.sqrt.default,
    "ToFloat": None,  # all are floats
}
"""What computes sympy's and torch's functions in expressions, by their names."""


_DIVIDES = ("FloatTrueDiv", "IntTrueDiv")


def is_computable_in_graph(number: FloatWithExpression) -> bool:
    """Returns whether tensor calls can compute a float of sizes without domain errors."""
    return _is_computable(number.expression, number)


def _is_computable(part: sympy.Expr, number: FloatWithExpression) -> bool:
    if part in number.sizes or part.is_number:
        return True
    name = type(part).__name__
    if name not in _FUNCTIONS or not all(_is_computable(x, number) for x in part.args):
        return False
    if name in _DIVIDES:
        return _least(part.args[1], number) > 0
    return name in ("Add", "Mul", "ToFloat") or _least(part.args[0], number) > 0


def _least(part: sympy.Expr, number: FloatWithExpression) -> float:
    """A bound for the least value of a part of a number; minus infinity if there is none known."""
    if part in number.sizes:
        return number.sizes[part].lower
    if part.is_number:
        return float(part)
    name = type(part).__name__
    least = [_least(x, number) for x in part.args]
    if name == "Add":
        return sum(least)
    if name == "Mul" and min(least) >= 0:
        return math.prod(least)
    if name in _DIVIDES and part.args[1].is_number and least[1] > 0:
        return least[0] / least[1]
    return least[0] if name == "ToFloat" else -math.inf


def emit_float_expression(
    number: FloatWithExpression,
    of_size: Callable[[SizeWithExpression], fx.Node],
    call: Callable[..., fx.Node],
) -> fx.Node:
    """Emits calls that compute a float of sizes as a 0-d tensor; returns the last node.

    Args:
        number: The number, computable.
        of_size: Makes a size a float tensor without dimensions.
        call: Makes a call that returns such a tensor, of an operator and its arguments.
    """

    def tensor(part: sympy.Expr) -> fx.Node:
        if part in number.sizes:
            return of_size(number.sizes[part])
        if part.is_number:
            return call(aten.scalar_tensor.default, float(part))
        function = _FUNCTIONS[type(part).__name__]
        values = [tensor(x) for x in part.args]
        if len(values) > 1:
            return functools.reduce(lambda left, right: call(function, left, right), values)
        return values[0] if function is None else call(function, *values)

    return tensor(number.expression)

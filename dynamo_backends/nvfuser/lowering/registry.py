"""The table from ATen overloads to functions of a fusion's values, and the look-up for each call.

A row is a function under the overload's exact name; its parameters are those of the ATen schema::

    @lowers("permute.default")
    def permute(x, dims):
        return x.permute([d % x.ndim for d in dims])

    @pointwise("gelu.default")
    def gelu(x, *, approximate="none"):
        ...

Tensors arrive as `Value`s, everything else as in the graph. A row that cannot lower a call raises
`Unsupported` with the reason. That is also what decides on support: a call is supported if its row
lowers it, alone.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import ELEMENTWISE_PROMOTION, elementwise_dtypes
from dynamo_backends.interface.errors import LoweringError
from dynamo_backends.nvfuser.recorder import Recorder, Value

Promotion = Literal["default", "int_to_float", "to_bool", "complex_to_float"]


class Unsupported(Exception):
    """A call cannot be lowered; the text is the reason."""


@dataclass(frozen=True)
class LoweringRule:
    """How one ATen overload is lowered: its function and its type promotion.

    Attributes:
        fn: The function.
        promotion: torch's rule of type promotion, for functions of elements: the operands arrive
            in the type in which torch computes. None: they arrive as they are.
        operands: Number of leading arguments in the promotion; None: all positional ones.
        context: The function's first argument is the call, a `Call`.
    """

    fn: Callable[..., Any]
    promotion: Promotion | None
    operands: int | None
    context: bool


@dataclass(frozen=True)
class Call:
    """A call that is being lowered, for rows that have to know more than its arguments.

    Attributes:
        recorder: Where values are computed.
        out: Fake tensors of the result, or of each.
    """

    recorder: Any
    out: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the only result."""
        return tuple(self.out.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the only result."""
        kind: torch.dtype = self.out.dtype
        return kind


TABLE: dict[str, LoweringRule] = {}


def register_lowering(*names: str, context: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Registers a function that gets its arguments as they are.

    Args:
        names: Overloads of `aten`, such as "permute.default". Names that this torch does not have
            do no harm.
        context: Its first parameter is the `Call`.

    Raises:
        ValueError: A name is registered already.
    """
    return _registered(names, None, None, context)


def register_pointwise(
    *names: str,
    promote: Promotion = "default",
    operands: int | None = None,
    context: bool = False,
) -> Callable[[Callable[..., Any]], Any]:
    """Registers a function of elements, whose operands are broadcast.

    Args:
        names: As for `register_lowering`.
        promote: torch's rule of type promotion for it.
        operands: Number of leading arguments in it; None: all positional ones.
        context: Its first parameter is the `Call`.

    Raises:
        ValueError: A name is registered already.
    """
    return _registered(names, promote, operands, context)


def _registered(
    names: tuple[str, ...], promotion: Promotion | None, operands: int | None, context: bool
) -> Callable[[Callable[..., Any]], Any]:
    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            if f"aten.{name}" in TABLE:
                raise ValueError(f"{name} already has a lowering")
            TABLE[f"aten.{name}"] = LoweringRule(fn, promotion, operands, context)
        return fn

    return register


def lookup(op: Any) -> LoweringRule | None:
    """Returns the row of an overload, or None."""
    return TABLE.get(str(op))


def lower(
    graph: fx.Graph, inputs: Mapping[fx.Node, Value], recorder: Recorder
) -> dict[fx.Node, Any]:
    """Lowers all calls of a graph.

    Args:
        graph: In normal form, with static shapes.
        inputs: The placeholders that are read, as inputs of the recorder.
        recorder: Where values are computed.

    Returns:
        A value, or several, for each node.

    Raises:
        LoweringError: A call cannot be lowered; it names the node.
    """
    values: dict[fx.Node, Any] = dict(inputs)
    for node in graph.nodes:
        if node.op == "call_function":
            try:
                values[node] = lower_call(node, values, recorder)
            except Unsupported as reason:
                raise LoweringError(node.name, str(node.target), str(reason)) from reason
    return values


def lower_call(node: fx.Node, values: Mapping[fx.Node, Any], recorder: Recorder) -> Any:
    """Lowers one call into the fusion.

    Args:
        node: The call.
        values: Those of the nodes that it reads.
        recorder: Where values are computed.

    Raises:
        Unsupported: It cannot be lowered.
    """
    if node.target is operator.getitem:
        source, index = node.args
        return values[source][index]  # type: ignore[index]
    row = lookup(node.target)
    if row is None:
        raise Unsupported("it has no lowering to nvFuser")
    recorder.origin = node.name
    out = node.meta["val"]
    args = list(fx.map_arg(node.args, values.__getitem__))
    kwargs = fx.map_arg(node.kwargs, values.__getitem__)
    if row.promotion is not None:
        _promote(row, node, args)
    prefix = (Call(recorder, out),) if row.context else ()
    return _conform(row.fn(*prefix, *args, **kwargs), out)


def _promote(row: LoweringRule, node: fx.Node, args: list[Any]) -> None:
    """Converts the operands to the type in which torch computes, in place."""
    fakes = fx.map_arg(node.args, lambda n: n.meta["val"])
    count = len(args) if row.operands is None else row.operands
    places = [i for i, a in enumerate(args[:count]) if _is_operand(a)]
    kind = computation_dtype(row, [fakes[i] for i in places])
    for i in places:
        if isinstance(args[i], Value):
            args[i] = args[i].cast(kind)


def computation_dtype(row: LoweringRule, operands: Sequence[Any]) -> torch.dtype:
    """Returns the type in which torch computes a function of elements.

    Args:
        row: The row of the function, with a promotion rule.
        operands: Fake tensors and numbers.
    """
    assert row.promotion is not None
    compares = row.promotion == "to_bool"
    rule = ELEMENTWISE_PROMOTION["default" if compares else row.promotion]
    computed, common = elementwise_dtypes(*operands, type_promotion_kind=rule)
    return common if compares else computed


def _is_operand(value: Any) -> bool:
    return isinstance(value, Value | int | float)


def _conform(result: Any, promised: Any) -> Any:
    """Gives results the types that torch promises, and insists on the shapes."""
    if isinstance(promised, Tensor):
        if result.shape != tuple(promised.shape):
            raise Unsupported(
                f"its result would have the shape {result.shape} instead of {tuple(promised.shape)}"
            )
        return result.cast(promised.dtype)
    if isinstance(promised, list | tuple):
        return tuple(
            None if r is None or not isinstance(p, Tensor) else _conform(r, p)
            for r, p in zip(result, promised, strict=True)
        )
    raise Unsupported("its result is not a tensor")

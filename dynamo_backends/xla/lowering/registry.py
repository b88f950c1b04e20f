"""The table that maps ATen overloads to functions on jax arrays.

A lowering is a small pure function, registered under the overload's exact name::

    @lowers("index_select.default")
    def index_select(x, dim, index):
        return jnp.take(x, index, axis=dim)

    @pointwise("add.Tensor", "add.Scalar")
    def add(x, y, *, alpha=1):
        return x + y * alpha

Parameters and defaults are those of the ATen schema, in its order; `by_name` is for functions that
serve operators with different arguments. Tensor arguments arrive as jax arrays,
`int`, `float`, `bool`, dtype and list arguments as Python (torch) values. A function whose first
parameter is called `ctx` also gets the `Context`, which knows the node, its output's shape and
dtype, and the compile options. The interpreter casts the result to the dtype that torch promises
and refuses a result of another shape.

Support is decided beside the lowering: `when=` names a predicate on the FX node that returns a
reason when this very call cannot be lowered.
"""

import enum
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dynamo_backends._torch_private import ELEMENTWISE_PROMOTION, OpOverload, elementwise_dtypes
from dynamo_backends.xla.lowering.context import Context


class Promotion(enum.Enum):
    """The rule by which a pointwise operator chooses its computation dtype, as in torch."""

    DEFAULT = "default"  # the promoted dtype of its operands
    INT_TO_FLOAT = "int_to_float"  # the same, integers become the default float
    TO_BOOL = "to_bool"  # compute in the promoted dtype, result bool
    COMPLEX_TO_FLOAT = "complex_to_float"  # abs and friends
    NONE = "none"  # operands are handed over as they are


class Layout(enum.Enum):
    """The memory layouts that the lowering of an operator accepts."""

    LOGICAL = "logical"  # arrays in torch's dimension order
    POINTWISE = "pointwise"  # any, as long as all operands share it
    RAW = "raw"  # the function itself deals with `ChannelsLast` values


Predicate = Callable[[fx.Node], str | None]


@dataclass(frozen=True)
class Lowering:
    """One row of the table."""

    op: OpOverload
    fn: Callable[..., Any]
    layout: Layout
    promotion: Promotion
    operands: slice
    wants_context: bool
    when: Predicate | None


_TABLE: dict[OpOverload, Lowering] = {}
_LATER: dict[str, Callable[[], None]] = {}  # to be registered once torch has the overload


def register_lowering(
    *names: str, layout: Layout = Layout.LOGICAL, when: Predicate | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as the lowering of the ATen overloads called `names`.

    Args:
        names: Overloads, written `"op.overload"` for `aten` (`"add.Tensor"`, `"exp.default"`) or
            with a namespace, `"prims::name.default"`. A name that this torch version does not
            have is no error: it is looked for again when a call asks for it.
        layout: What the function can work on.
        when: Returns a reason if this call (an `fx.Node`) is not supported, else None.

    Raises:
        ValueError: An overload is registered twice.
    """

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            _add(name, fn, layout, Promotion.NONE, slice(0, 0), when)
        return fn

    return register


def register_pointwise(
    *names: str,
    promote: Promotion = Promotion.DEFAULT,
    operands: slice | None = None,
    when: Predicate | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers an elementwise, broadcasting function.

    Its operands (by default: the leading positional arguments of tensor or number type) arrive as
    arrays cast to torch's computation dtype, which for bfloat16 and float16 is float32; the result
    is rounded once, as in eager. Python numbers arrive as 0-d arrays of that dtype.

    Args:
        names: As for `register_lowering`.
        promote: torch's type promotion rule for this operator.
        operands: Which positional arguments take part in type promotion.
        when: As for `register_lowering`.
    """

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            _add(name, fn, Layout.POINTWISE, promote, operands, when)
        return fn

    return register


def by_name(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a lowering so that it gets only those schema arguments that it names.

    For operators that have arguments in common, and others that make no difference.

    Args:
        fn: Its first parameter is `ctx`.
    """
    wanted = inspect.signature(fn).parameters.keys()

    @functools.wraps(fn)
    def lowering(ctx: Context, *args: Any, **kwargs: Any) -> Any:
        names = [a.name for a in ctx.node.target._schema.arguments]  # type: ignore[union-attr]
        given = dict(zip(names, args, strict=False)) | kwargs
        return fn(ctx, **{name: value for name, value in given.items() if name in wanted})

    return lowering


def _resolve(name: str) -> OpOverload | None:
    namespace, _, rest = name.rpartition("::")
    packet_name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace or "aten"), packet_name, None)
    return getattr(packet, overload, None) if packet is not None else None


def _add(
    name: str,
    fn: Callable[..., Any],
    layout: Layout,
    promotion: Promotion,
    operands: slice | None,
    when: Predicate | None,
) -> None:
    op = _resolve(name)
    if op is None:
        _LATER[_spelled(name)] = lambda: _add(name, fn, layout, promotion, operands, when)
        return
    if op in _TABLE:
        raise ValueError(f"{name} already has a lowering: {_TABLE[op].fn.__qualname__}")
    first = next(iter(inspect.signature(fn).parameters), None)
    if operands is None:
        operands = slice(0, _leading_operands(op))
    _TABLE[op] = Lowering(op, fn, layout, promotion, operands, first == "ctx", when)


def _leading_operands(op: OpOverload) -> int:
    count = 0
    for argument in op._schema.arguments:
        kind = str(argument.type).removeprefix("Optional[").removesuffix("]")
        if argument.kwarg_only or kind not in ("Tensor", "number", "float", "int"):
            break
        count += 1
    return count


def lookup(op: Any) -> Lowering | None:
    """Returns the lowering of an ATen overload, or None."""
    row = _TABLE.get(op)
    if row is None and (register := _LATER.pop(str(op), None)) is not None:
        register()
        row = _TABLE.get(op)
    return row


def _spelled(name: str) -> str:
    """Returns an overload's name as torch writes it."""
    return name.replace("::", ".") if "::" in name else f"aten.{name}"


def overloads() -> Iterator[OpOverload]:
    """Returns every overload that has a lowering."""
    return iter(_TABLE)


def computation_dtype(lowering: Lowering, args: tuple[Any, ...]) -> torch.dtype:
    """Returns the dtype in which torch computes a pointwise call.

    Args:
        lowering: A row registered by `register_pointwise`.
        args: Fake tensors and Python numbers, as in the FX node's positional arguments.
    """
    operands = [a for a in args[lowering.operands] if a is not None]
    if lowering.promotion is Promotion.TO_BOOL:  # comparisons round their operands as eager does
        rule = ELEMENTWISE_PROMOTION[Promotion.DEFAULT.value]
        return elementwise_dtypes(*operands, type_promotion_kind=rule)[1]
    rule = ELEMENTWISE_PROMOTION[lowering.promotion.value]
    return elementwise_dtypes(*operands, type_promotion_kind=rule)[0]

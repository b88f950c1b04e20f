"""The table from ATen overloads to functions that compute with a fusion's values.

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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

Promotion = Literal["default", "int_to_float", "to_bool", "complex_to_float"]


class Unsupported(Exception):
    """A call cannot be lowered; the text is the reason."""


@dataclass(frozen=True)
class Row:
    """How an overload is lowered.

    Attributes:
        fn: The function.
        promotion: torch's rule of type promotion, for functions of elements: the operands arrive
            in the type in which torch computes. None: they arrive as they are.
        operands: So many leading arguments take part in the promotion; None: all positional ones.
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
        """Of the only result."""
        return tuple(self.out.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of the only result."""
        kind: torch.dtype = self.out.dtype
        return kind


TABLE: dict[str, Row] = {}


def lowers(*names: str, context: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Registers a function that gets its arguments as they are.

    Args:
        names: Overloads of `aten`, such as "permute.default". Names that this torch does not have
            do no harm.
        context: Its first parameter is the `Call`.

    Raises:
        ValueError: A name is registered already.
    """
    return _registered(names, None, None, context)


def pointwise(
    *names: str,
    promote: Promotion = "default",
    operands: int | None = None,
    context: bool = False,
) -> Callable[[Callable[..., Any]], Any]:
    """Registers a function of elements, whose operands are broadcast.

    Args:
        names: As for `lowers`.
        promote: torch's rule of type promotion for it.
        operands: So many leading arguments take part in it; None: all positional ones.
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
            TABLE[f"aten.{name}"] = Row(fn, promotion, operands, context)
        return fn

    return register


def lookup(op: Any) -> Row | None:
    """Returns the row of an overload, or None."""
    return TABLE.get(str(op))

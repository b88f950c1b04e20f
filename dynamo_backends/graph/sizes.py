"""Sizes that are integers for one call and know the expression that they come from.

A graph for concrete shapes may have come from one with symbolic shapes. For a backend that can
serve a range of shapes with one program, `specialize` leaves in it what the symbols were.
"""

from typing import Any, Self

import sympy
import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import size_bounds
from dynamo_backends.graph.graph import Graph

Symbolic = torch.SymInt | torch.SymFloat | torch.SymBool

SIZES = "sizes"
"""Key in a node's `meta`: the sizes of its tensor, as a tuple of numbers, some of them `Size`."""


def is_symbolic(value: Any) -> bool:
    """Whether a value is a symbolic number or a tensor with symbolic sizes."""
    if isinstance(value, Symbolic):
        return True
    if isinstance(value, torch.Tensor):
        return any(isinstance(s, Symbolic) for s in (*value.shape, *value.stride()))
    return False


class Size(int):
    """A size of one call; in arithmetic, text and hashes a plain integer.

    Args:
        value: In this call.
        expression: Over the symbols of the captured graph.
        lower: The smallest value that the guards allow.
        upper: The largest one; None: there is no bound.
    """

    expression: sympy.Expr
    lower: int
    upper: int | None

    def __new__(cls, value: int, expression: sympy.Expr, lower: int, upper: int | None) -> Self:
        """See the class."""
        size = super().__new__(cls, value)
        size.expression = expression
        size.lower = lower
        size.upper = upper
        return size

    def __getnewargs__(self) -> tuple[Any, ...]:
        """For copies."""
        return int(self), self.expression, self.lower, self.upper


def remembering(symbolic: Any, value: Any) -> Any:
    """The value of a symbolic integer in one call as a `Size`; of anything else, as it is."""
    if isinstance(symbolic, torch.SymInt):
        return Size(value, symbolic.node.expr, *size_bounds(symbolic))
    return value


def forget_in_numbers(graph: Graph) -> None:
    """Makes plain integers of sizes that are given where an operator takes any number.

    Type promotion in torch knows the built-in types only.
    """
    for node in graph.calls:
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            continue
        integers = {a.name for a in schema.arguments if "int" in str(a.type)}
        pairs = zip((a.name for a in schema.arguments), node.args, strict=False)
        node.args = tuple(a if name in integers else _plain(a) for name, a in pairs)
        node.kwargs = {k: a if k in integers else _plain(a) for k, a in node.kwargs.items()}


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, Size) else value


def sizes_of(node: fx.Node) -> tuple[int | None, ...]:
    """The sizes of a node's tensor; None for those that nothing is known of but this call's value.

    Those of a graph that was never symbolic are all plain numbers.
    """
    value = node.meta["val"]
    known = node.meta.get(SIZES)
    if not isinstance(value, Tensor):
        return ()
    if known is not None and tuple(known) == tuple(value.shape):
        return tuple(known)
    return (None,) * value.ndim


def is_ranged(graph: fx.Graph) -> bool:
    """Whether a graph for concrete shapes came from one with symbolic shapes."""
    return any(
        isinstance(size, Size)
        for node in graph.find_nodes(op="placeholder")
        for size in node.meta.get(SIZES) or ()
    )

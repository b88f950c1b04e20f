"""Calls that compute, from sizes, a number that is no integer (see `graph.sizes.FloatOfSizes`)."""

import functools
import math
from collections.abc import Callable

import sympy
import torch
from torch import fx

from dynamo_backends.graph.sizes import FloatOfSizes, Size

aten = torch.ops.aten

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


def is_computable(number: FloatOfSizes) -> bool:
    """Whether there are calls that compute a number from sizes, where Python would not raise."""
    return _is_computable(number.expression, number)


def _is_computable(part: sympy.Expr, number: FloatOfSizes) -> bool:
    if part in number.sizes or part.is_number:
        return True
    name = type(part).__name__
    if name not in _FUNCTIONS or not all(_is_computable(x, number) for x in part.args):
        return False
    if name in _DIVIDES:
        return _least(part.args[1], number) > 0
    return name in ("Add", "Mul", "ToFloat") or _least(part.args[0], number) > 0


def _least(part: sympy.Expr, number: FloatOfSizes) -> float:
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


def float_as_tensor(
    number: FloatOfSizes, of_size: Callable[[Size], fx.Node], call: Callable[..., fx.Node]
) -> fx.Node:
    """Makes calls that compute a number from sizes.

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

"""Calls that compute, from sizes, a number that is no integer (see `graph.sizes.Ratio`)."""

import functools
from collections.abc import Callable

import sympy
import torch
from torch import fx

from dynamo_backends.graph.sizes import Ratio, Size

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


def is_computable(ratio: Ratio) -> bool:
    """Whether there are calls that compute a number from sizes."""
    return _is_computable(ratio.expression, ratio)


def _is_computable(part: sympy.Expr, ratio: Ratio) -> bool:
    if part in ratio.sizes or part.is_number:
        return True
    return type(part).__name__ in _FUNCTIONS and all(_is_computable(x, ratio) for x in part.args)


def ratio_as_tensor(
    ratio: Ratio, of_size: Callable[[Size], fx.Node], call: Callable[..., fx.Node]
) -> fx.Node:
    """Makes calls that compute a number from sizes.

    Args:
        ratio: The number, computable.
        of_size: Makes a size a float tensor without dimensions.
        call: Makes a call that returns such a tensor, of an operator and its arguments.
    """

    def tensor(part: sympy.Expr) -> fx.Node:
        if part in ratio.sizes:
            return of_size(ratio.sizes[part])
        if part.is_number:
            return call(aten.scalar_tensor.default, float(part))
        function = _FUNCTIONS[type(part).__name__]
        values = [tensor(x) for x in part.args]
        if len(values) > 1:
            return functools.reduce(lambda left, right: call(function, left, right), values)
        return values[0] if function is None else call(function, *values)

    return tensor(ratio.expression)

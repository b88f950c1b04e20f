"""Symbolic sizes of our own making.

| name | torch |
|---|---|
| `ShapeEnv.create_symbol`, `create_symintnode`, `guards`, `var_to_range` | 2.11+ |
| `torch.utils._sympy.value_ranges.ValueRanges`, `numbers.int_oo` | 2.11+ |
| `Tensor._dynamo_dynamic_range`, of `torch._dynamo.mark_dynamic` | 2.11+ |
| `DimDynamic`, `ConstantSource` | 2.11+ |
"""

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


def marked_ranges(value: Any) -> dict[int, tuple[int, int | None]]:
    """Returns the (min, max) bounds of dimensions marked by `mark_dynamic`."""
    marked = getattr(value, "_dynamo_dynamic_range", ())
    return {each.dim: (each.min or 2, each.max) for each in marked}


class FreshSymbols:
    """New symbolic sizes in a `ShapeEnv` of their own, standing for given expressions.

    Args:
        values: What each is in one call, at least 2; expressions stand for what is not made of
            symbols that are known.
        ranges: The least and the largest values of some (None: there is no bound); else they are
            at least 2.

    Attributes:
        mode: Mode of the fake tensors.
        values: What each of the new symbols is in that call.
    """

    def __init__(
        self,
        values: Mapping[sympy.Expr, int],
        ranges: Mapping[sympy.Expr, tuple[int, int | None]] | None = None,
    ):
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

        self._env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self._env, allow_non_fake_inputs=True)
        self._own: dict[sympy.Expr, sympy.Symbol] = {}
        for i, (given, value) in enumerate(values.items()):
            own = self._env.create_symbol(
                value, ConstantSource(f"size_{i}"), dynamic_dim=DimDynamic.DYNAMIC
            )
            self._own[given] = own
            if ranges is not None and given in ranges:
                self._env.var_to_range[own] = _range(*ranges[given])
        self.values = {self._own[given]: sympy.Integer(value) for given, value in values.items()}
        self._given = {own: given for given, own in self._own.items()}

    def size(self, expression: sympy.Expr) -> torch.SymInt:
        """Returns a `SymInt` for an expression over the given symbols.

        Args:
            expression: Over the symbols that were given.

        Raises:
            ValueError: It is over others, too.
        """
        own = sympy.sympify(expression).xreplace(self._own)
        if not own.free_symbols <= self.values.keys():
            raise ValueError(f"the size {expression} uses symbols without a known value")
        made: Any = self._env.create_symintnode(own, hint=int(own.xreplace(self.values)))
        return made

    def tensor(self, sizes: Any, strides: Any, like: Tensor) -> Tensor:
        """Returns a fake tensor with these sizes and strides, dtype and device of `like`."""
        with self.mode:
            return torch.empty_strided(sizes, strides, dtype=like.dtype, device=like.device)

    def to_given_symbols(self, expression: sympy.Expr) -> sympy.Expr:
        """Rewrites an expression over the new symbols in terms of the given ones."""
        return expression.xreplace(self._given)

    @property
    def guards(self) -> list[sympy.Basic]:
        """Returns the guards that a compiler added, over the given symbols."""
        return [self.to_given_symbols(guard.expr) for guard in self._env.guards]


def _range(lower: int, upper: int | None) -> Any:
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges

    return ValueRanges(lower, int_oo if upper is None else upper)

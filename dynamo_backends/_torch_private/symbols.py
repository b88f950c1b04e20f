"""Symbolic sizes of our own making.

| name | torch |
|---|---|
| `ShapeEnv.create_symbol`, `create_symintnode`, `guards` | 2.11 to 2.13 |
| `Tensor._dynamo_dynamic_range`, of `torch._dynamo.mark_dynamic` | 2.11 to 2.13 |
| `DimDynamic`, `ConstantSource` | 2.11 to 2.13 |
"""

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


def marked_ranges(value: Any) -> dict[int, tuple[int, int | None]]:
    """The dimensions that `torch._dynamo.mark_dynamic` has marked, each with its bounds."""
    marked = getattr(value, "_dynamo_dynamic_range", ())
    return {each.dim: (each.min or 2, each.max) for each in marked}


class FreshSymbols:
    """Symbols for the sizes of fake tensors that a compiler is given.

    Args:
        values: What each is in one call, at least 2.

    Attributes:
        mode: Of the fake tensors.
    """

    def __init__(self, values: Mapping[sympy.Symbol, int]):
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

        self._env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self._env, allow_non_fake_inputs=True)
        self._own = {
            symbol: self._env.create_symbol(
                value, ConstantSource(f"size_{i}"), dynamic_dim=DimDynamic.DYNAMIC
            )
            for i, (symbol, value) in enumerate(values.items())
        }

    def size(self, expression: sympy.Expr, value: int) -> torch.SymInt:
        """A symbolic integer.

        Args:
            expression: Over the symbols that were given.
            value: In the same call.
        """
        own = sympy.sympify(expression).xreplace(self._own)
        made: Any = self._env.create_symintnode(own, hint=value)
        return made

    def tensor(self, sizes: Any, strides: Any, like: Tensor) -> Tensor:
        """A fake tensor of symbolic sizes and strides."""
        with self.mode:
            return torch.empty_strided(sizes, strides, dtype=like.dtype, device=like.device)

    @property
    def guards(self) -> list[sympy.Basic]:
        """What a compiler has assumed of the symbols that were given."""
        given = {own: symbol for symbol, own in self._own.items()}
        return [guard.expr.xreplace(given) for guard in self._env.guards]

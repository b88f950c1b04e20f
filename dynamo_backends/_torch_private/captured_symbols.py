"""Keeps the symbols of a capture for those who compile it after Dynamo's call.

| what | checked |
|---|---|
| `torch._guards.TracingContext.tensor_to_context`, `fake_mode` | 2.11+ |
| `StatefulSymbolicContext.dynamic_sizes`, `DimDynamic` | 2.11+ |
| `ShapeEnv.guards`, also of a frozen one; `replacements` | 2.11+ |
| `torch._dynamo.maybe_mark_dynamic`, `mark_static` | 2.11+ |
"""

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode


class CapturedSymbols:
    """The symbolic sizes of a captured graph, for compiling it after the capture.

    Dynamo's guards are made when the backend returns. What is assumed of symbols after that is
    guarded by nobody, so whoever compiles has to look at `assumed`.

    Args:
        inputs: As Dynamo gives them: real tensors, and symbols.

    Attributes:
        numbers: By position, what those inputs are that are symbols by themselves.
        dims: By position, for each dimension of a tensor how Dynamo treats it: "STATIC",
            "DYNAMIC" (a symbol of its own), "DUCK" (the symbol of equal sizes), or another.
    """

    def __init__(self, inputs: Sequence[Any]):
        from torch._guards import TracingContext

        context: Any = TracingContext.get()
        known = context.tensor_to_context
        self._env: Any = context.fake_mode.shape_env
        self._contexts: dict[int, Any] = {
            i: known[x] for i, x in enumerate(inputs) if isinstance(x, Tensor) and x in known
        }
        self._guards = len(self._env.guards)
        self._replacements: dict[Any, Any] = dict(self._env.replacements)
        expressions = {i: x.node.expr for i, x in enumerate(inputs) if isinstance(x, torch.SymInt)}
        self.numbers = {i: x for i, x in expressions.items() if isinstance(x, sympy.Symbol)}
        self.dims = {
            i: [kind.name for kind in context.dynamic_sizes]
            for i, context in self._contexts.items()
            if hasattr(context, "dynamic_sizes")
        }

    def context(self, inputs: Sequence[Any]) -> Any:
        """Returns a `TracingContext` in which AOT Autograd reuses the captured symbols.

        Args:
            inputs: Inputs of the same sizes as those of the capture.
        """
        from torch._guards import TracingContext

        made: Any = TracingContext(FakeTensorMode(shape_env=self._env))
        for i, context in self._contexts.items():
            made.tensor_to_context[inputs[i]] = context
        return made

    def new_assumptions(self) -> list[sympy.Basic]:
        """Returns the guards added since the capture, over the symbols in `numbers`."""
        return [self._resolved(guard.expr) for guard in self._env.guards[self._guards :]]

    def _resolved(self, expression: sympy.Basic) -> sympy.Basic:
        """Rewrites symbols that the capture had replaced; later replacements stay."""
        while (made := expression.xreplace(self._replacements)) != expression:
            expression = made
        return expression


def mark_dims(tensor: Tensor, kinds: Sequence[str]) -> None:
    """Marks each dimension static or dynamic, for a `dynamic=True` compilation.

    Args:
        tensor: An input.
        kinds: As in `CapturedSymbols.dims`.
    """
    import torch._dynamo

    for dim, kind in enumerate(kinds):
        if kind == "DYNAMIC":
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
        elif kind == "STATIC":
            torch._dynamo.mark_static(tensor, dim)

"""The dialect: which calls a graph in normal form may have.

- Overloads of ATen, and of other operator libraries, that write to none of their arguments. What
  torch's core ATen decompositions decompose does not occur, unless the backend keeps it whole.
- Overloads that torch itself replaces while tracing (`CompositeImplicitAutograd`, such as
  `aten.matmul`) do not occur, unless decomposing them was switched off for a custom operator.
- Questions for the sizes of results that depend on data (`aten.sym_size.int` and the like).
- `operator.getitem` on the result of a call with several results.
- Arithmetic on symbolic sizes: functions of the modules `operator` and `math`, and `torch.sym_*`.
- `graph.random.DRAWS`: random numbers that torch draws, and those that a checkpoint draws twice.
- Higher-order operators (such as `torch.cond`), which run in eager with their graphs.
"""

import functools
import math
import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from dynamo_backends._torch_private import HigherOrderOperator, OpOverload, is_composite
from dynamo_backends.graph.decompositions import decompositions
from dynamo_backends.graph.random import DRAWS


@functools.cache
def _functions() -> frozenset[Callable[..., Any]]:
    """Python functions of the dialect."""
    symbolic = [getattr(torch, name) for name in dir(torch) if name.startswith("sym_")]
    arithmetic = [f for m in (operator, math) for f in vars(m).values() if callable(f)]
    return frozenset((*DRAWS, *symbolic, *arithmetic))


def why_not(node: fx.Node, keep: Collection[OpOverload] | None = None) -> str | None:
    """Why a call is not of the dialect; None if it is.

    Args:
        node: A `call_function` node.
        keep: What the backend takes whole; None: do not ask whether the call is decomposed.
    """
    target = node.target
    if isinstance(target, OpOverload):
        if keep is not None and target in decompositions(()) and target not in keep:
            return f"{target} is composite and was not decomposed"
        if is_composite(target) and not target._schema.name.startswith("aten::sym_"):
            return f"{target} is made of other operators; torch replaces it while tracing"
        return None
    if isinstance(target, HigherOrderOperator) or target in _functions():
        return None
    return f"{target} is not an operator overload"


def writes(node: fx.Node) -> bool:
    """Whether a call writes to one of its arguments."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable

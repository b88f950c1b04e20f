"""Who has won for graphs of the same function at other sizes.

Dynamo captures a function with the sizes of its first call, and with symbols once a size changes.
The first graph may take all of the budget, and the one that serves all later calls would stay in
eager. So the winner of the first is tried first, and in any case.
"""

import hashlib
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, fx

from dynamo_backends.autotune.identity import describe, qualified
from dynamo_backends.runtime.lru import LRU

_winners: LRU[str, str] = LRU(256)


def mark_of(
    captured: fx.GraphModule, values: Sequence[Any], static: Collection[int], kind: str
) -> str:
    """A hash that graphs of the same function have in common, whatever the sizes of their inputs.

    Args:
        captured: A graph of Dynamo's.
        values: Its inputs.
        static: Positions of parameters and buffers, whose sizes do count.
        kind: "inference" or "training".
    """
    calls = (n for n in captured.graph.nodes if n.op.startswith("call_") and _is_tensor(n))
    weights = (describe(values[i]) for i in sorted(static) if isinstance(values[i], Tensor))
    lines = [kind, *(qualified(node.target) for node in calls), *weights]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _is_tensor(node: fx.Node) -> bool:
    """Whether a call gives tensors; what computes sizes is there in graphs with symbols alone."""
    value = node.meta.get("example_value")
    return any(isinstance(x, Tensor) for x in (value if isinstance(value, Sequence) else [value]))


def note(mark: str, winner: str) -> None:
    """Notes who has won for a graph."""
    _winners.put(mark, winner)


def winner(mark: str) -> str | None:
    """Who has won for a graph of the same function, the last one; None: there was none."""
    return _winners.get(mark)

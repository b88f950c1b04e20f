"""Remembers which candidates were right and fast for the same function at other sizes.

Dynamo captures a function with the sizes of its first call, and with symbols once a size changes.
The first graph may take all of the budget, and the one that serves all later calls would stay in
eager. So the candidates that were faster than eager for the first are tried first, the fastest one
before the others; where sizes are symbols, whatever is left of the budget until one is right.
"""

import hashlib
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, fx

from dynamo_backends.autotune.decisions import qualified_name, value_signature
from dynamo_backends.autotune.options import EAGER
from dynamo_backends.interface.report import CandidateReport
from dynamo_backends.runtime.cache import LRU

_ranked: LRU[str, tuple[str, ...]] = LRU(256)


def hash_without_sizes(
    captured: fx.GraphModule, values: Sequence[Any], static: Collection[int], kind: str
) -> str:
    """Hashes a captured function without its activations' sizes; weights' shapes count.

    Args:
        captured: A graph of Dynamo's.
        values: Its inputs.
        static: Positions of parameters and buffers, whose sizes do count.
        kind: "inference" or "training".
    """
    calls = (n for n in captured.graph.nodes if n.op.startswith("call_") and _is_tensor(n))
    weights = (value_signature(values[i]) for i in sorted(static) if isinstance(values[i], Tensor))
    lines = [kind, *(qualified_name(node.target) for node in calls), *weights]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _is_tensor(node: fx.Node) -> bool:
    """Returns whether a call returns tensors; calls that compute sizes do not."""
    value = node.meta.get("example_value")
    return any(isinstance(x, Tensor) for x in (value if isinstance(value, Sequence) else [value]))


def note_ranking(function: str, winner: str, rows: Sequence[CandidateReport]) -> None:
    """Remembers which candidates were faster than eager for a function, best first.

    Args:
        function: Its hash.
        winner: Who runs it; if that is eager, nothing is noted.
        rows: Rows of all candidates, the fastest one first.
    """
    if winner == EAGER:
        return
    others = (row.name for row in rows if row.name not in (winner, EAGER) and row.is_faster)
    _ranked.put(function, (winner, *others))


def ranked_candidates(function: str) -> tuple[str, ...]:
    """Returns the remembered candidates of a function, best first; () if unknown."""
    return _ranked.get(function) or ()

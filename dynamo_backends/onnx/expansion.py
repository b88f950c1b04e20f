"""Takes single calls apart by torch's own decompositions, where ONNX has nothing for them whole."""

import functools
from collections.abc import Callable
from typing import Any

from torch import fx

from dynamo_backends.graph.decompose import decompose
from dynamo_backends.graph.decompositions import every_rule
from dynamo_backends.onnx.rules import is_lowered


@functools.cache
def _rules() -> dict[Any, Callable[..., Any]]:
    return {op: rule for op, rule in every_rule().items() if not is_lowered(op)}


def expand(node: fx.Node) -> None:
    """Replaces a call in its graph by simpler calls, whose `meta["expanded_from"]` names it.

    Raises:
        LoweringError: torch's decomposition does not lead to functional calls.
    """
    target: Any = node.target
    decompose(node, {**_rules(), target: every_rule()[target]})

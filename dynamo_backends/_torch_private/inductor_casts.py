"""Casts to float16 and bfloat16, which Inductor leaves out of its loops by default.

| what | checked |
|---|---|
| `torch._inductor.config.emulate_precision_casts` | 2.11+ |
"""

from typing import Any

import torch
from torch import Tensor, fx

_CASTS = frozenset({torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default})


def settings_for_casts(graph: fx.Graph) -> dict[str, Any]:
    """Settings of Inductor by which casts to less precise types round.

    They make loops in float16 and bfloat16 round after each operator, as eager does, so graphs
    without such a cast do not get them.
    """
    rounds = any(node.target in _CASTS and _is_rounding(node) for node in graph.nodes)
    return {"emulate_precision_casts": True} if rounds else {}


def _is_rounding(node: fx.Node) -> bool:
    source: Any = node.args[0]
    value, result = source.meta.get("val"), node.meta.get("val")
    if not isinstance(value, Tensor) or not isinstance(result, Tensor):
        return False
    if not result.is_floating_point() or result.dtype.itemsize != 2:
        return False
    return value.dtype != result.dtype

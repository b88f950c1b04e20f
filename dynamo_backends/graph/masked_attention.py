"""Makes attention whose mask hides every key from a query return zeros, not NaN.

Eager gives such a query zeros. Vendors compute the softmax of nothing but -inf, which is NaN, and
from there it reaches everything that the next layer computes.
"""

import math
import operator

import torch
from torch import Tensor, fx

from dynamo_backends.graph.call_decomposition import get_origin_name, replace_call
from dynamo_backends.graph.call_tracing import CallTraceCache

_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def zero_fully_masked_queries(module: fx.GraphModule) -> None:
    """Makes masked attention give zeros, not NaN, for queries that see no key; in place."""
    traces = CallTraceCache()
    for node in module.graph.find_nodes(op="call_function", target=_attention):
        if node.kwargs.get("attn_mask") is not None:
            call = get_origin_name(node)
            replace_call(node, _guarded, traces=traces)
            _keep_strides(module.graph, call)


def _keep_strides(graph: fx.Graph, name: str) -> None:
    """Results are promised with the strides of attention, which filling does not keep."""
    for filled in graph.find_nodes(op="call_function", target=torch.ops.aten.masked_fill.Scalar):
        source = filled.args[0]
        if get_origin_name(filled) == name and source.target is operator.getitem:
            filled.meta["val"] = source.meta["val"]


def _guarded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    # Vendors lack `all`, or take the maximum of nothing but -inf for a finite number.
    hidden = (attn_mask != -math.inf).to(attn_mask.dtype).sum(-1, keepdim=True) == 0
    result, log_sum = _attention(
        query,
        key,
        value,
        dropout_p,
        is_causal,
        attn_mask=attn_mask.masked_fill(hidden, 0),
        scale=scale,
    )
    return result.masked_fill(hidden, 0), log_sum.masked_fill(hidden.squeeze(-1), 0)

"""Which of torch's element types OpenVINO computes with, and what it makes of the others."""

import torch
from torch import Tensor, fx

from dynamo_backends.openvino.vendor import Type

DTYPES = {
    torch.bool: Type.boolean,
    torch.uint8: Type.u8,
    torch.int8: Type.i8,
    torch.int16: Type.i16,
    torch.int32: Type.i32,
    torch.int64: Type.i64,
    torch.float16: Type.f16,
    torch.bfloat16: Type.bf16,
    torch.float32: Type.f32,
    torch.float64: Type.f32,
}
"""OpenVINO's element types, by torch's (see `why_dtype_unsupported` for others).

It computes float64 in float32, and its casts have no infinities. So models have float32 in the
place of float64 (see `replace_float64`), to and from which torch casts inputs and outputs.
"""

aten = torch.ops.aten
_NARROWER = (torch.float16, torch.bfloat16, torch.float32)


def why_dtype_unsupported(node: fx.Node, dtype: torch.dtype) -> str | None:
    """Why OpenVINO cannot take tensors of a dtype in a call; None if it can."""
    if dtype == torch.float64:
        return None if _is_cast(node) else "OpenVINO computes float64 in float32"
    return None if dtype in DTYPES else f"OpenVINO does not compute with {dtype}"


def _is_cast(node: fx.Node) -> bool:
    """Returns whether a call casts between float64 and a type that float32 represents."""
    if node.target is not aten._to_copy.default:
        return False
    dtypes = {x.meta["val"].dtype for x in (node, *node.all_input_nodes)}
    return len(dtypes) == 2 and dtypes <= {torch.float64, *_NARROWER}


def replace_float64(graph: fx.Graph) -> None:
    """Replaces float64 by float32 in a graph whose calls only cast float64.

    Args:
        graph: Whose calls have been asked about (see `why_dtype_unsupported`).
    """
    for node in graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.dtype != torch.float64:
            continue
        node.meta["val"] = value.to(torch.float32)
        if node.target is aten._to_copy.default:
            node.kwargs = {**node.kwargs, "dtype": torch.float32}
    for node in graph.find_nodes(op="call_function", target=aten._to_copy.default):
        (source,) = node.args
        if source.meta["val"].dtype == node.meta["val"].dtype == torch.float32:
            # Two outputs may be the same value, which is known of this operator.
            node.target, node.kwargs = aten.clone.default, {}

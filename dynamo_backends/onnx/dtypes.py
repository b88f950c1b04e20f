"""Torch's element types in ONNX, and the calls that the nodes of a model come from."""

import onnx_ir as ir
import torch

DTYPES = {
    torch.bool: ir.DataType.BOOL,
    torch.uint8: ir.DataType.UINT8,
    torch.uint16: ir.DataType.UINT16,
    torch.uint32: ir.DataType.UINT32,
    torch.uint64: ir.DataType.UINT64,
    torch.int8: ir.DataType.INT8,
    torch.int16: ir.DataType.INT16,
    torch.int32: ir.DataType.INT32,
    torch.int64: ir.DataType.INT64,
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
    torch.float32: ir.DataType.FLOAT,
    torch.float64: ir.DataType.DOUBLE,
}
"""ONNX's element types. Models have no tensors of others (complex, float8, quantized types)."""


_LABEL = "dynamo_backends.call"


def label_new_nodes(model: ir.Model, call: str) -> None:
    """Labels the nodes added to a model since the last call with the FX call they lower.

    Args:
        model: The model.
        call: Name of the call that they come from.
    """
    for node in reversed(model.graph):
        if _LABEL in node.metadata_props:
            return
        node.metadata_props[_LABEL] = call


def name_nodes(model: ir.Model) -> None:
    """Names each ONNX node "<FX call>/<index>", as error messages and profiles show it.

    Nodes that a rewriting made belong to the call whose result they compute, or else to the one
    that reads what they compute, or else to the one whose result they read.
    """
    calls: dict[ir.Node, str] = {}
    results = {
        str(value.name): node.metadata_props[_LABEL]
        for node in model.graph
        if _LABEL in node.metadata_props
        for value in node.outputs
    }
    for node in reversed(model.graph):
        label = node.metadata_props.get(_LABEL)
        if label is None:
            label = next((results[n] for v in node.outputs if (n := str(v.name)) in results), None)
        if label is None:
            readers = (use.node for value in node.outputs for use in value.uses())
            label = next((calls[r] for r in readers if r in calls), "")
        calls[node] = label
    for i, node in enumerate(model.graph):
        if not calls[node]:
            makers = (v.producer() for v in node.inputs if v is not None)
            calls[node] = next((calls[m] for m in makers if m in calls), "")
        node.name = f"{calls[node]}/{i}"


def source_call_name(name: str) -> str:
    """Returns the FX call's name in an ONNX node's name; "" if it belongs to none."""
    return name.rpartition("/")[0]

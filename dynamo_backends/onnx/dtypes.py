"""The correspondence between torch's and ONNX's element types."""

import onnx_ir as ir
import torch

_FROM_TORCH = {
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


def is_supported(dtype: torch.dtype) -> bool:
    """Whether models have tensors of `dtype` (complex, float8 and quantized types: no)."""
    return dtype in _FROM_TORCH


def to_onnx(dtype: torch.dtype) -> ir.DataType:
    """The ONNX element type of a torch dtype.

    Raises:
        KeyError: There is none; ask `is_supported` first.
    """
    return _FROM_TORCH[dtype]

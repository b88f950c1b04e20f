"""The correspondence between torch's and TVM's element types."""

import torch

NARROW = ("float16", "bfloat16")
"""Floating-point types in which TVM is not to sum, and the C library does not compute."""

_FROM_TORCH = {
    torch.bool: "bool",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}


def is_supported(dtype: torch.dtype) -> bool:
    """Whether TVM's frontend knows `dtype` (complex, float8 and quantized types: no)."""
    return dtype in _FROM_TORCH


def to_tvm(dtype: torch.dtype) -> str:
    """TVM's name of a torch dtype.

    Raises:
        KeyError: There is none; ask `is_supported` first.
    """
    return _FROM_TORCH[dtype]


def to_torch(name: str) -> torch.dtype | None:
    """The torch dtype of a name of TVM's; None if there is none."""
    return _TO_TORCH.get(name)


_TO_TORCH = {name: dtype for dtype, name in _FROM_TORCH.items()}

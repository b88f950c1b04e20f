"""The correspondence between torch's and TVM's element types."""

import torch

NARROW = ("float16", "bfloat16")
"""Floating-point types in which TVM is not to sum, and the C library does not compute."""

INTEGERS = frozenset({"int8", "int16", "int32", "int64", "uint8"})

DTYPES = {
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
"""TVM's names of element types. Its frontend knows no others (complex, float8, quantized types)."""

TO_TORCH = {name: dtype for dtype, name in DTYPES.items()}

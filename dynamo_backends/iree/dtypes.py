"""Which of torch's element types IREE computes with, and which may be parameters of a program."""

import torch

DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
)
"""What IREE computes with: not with unsigned 16 to 64 bits, float8 and quantized types."""

PARAMETERS = {
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
}
"""MLIR's names of the types that weights need to be worth preparing."""

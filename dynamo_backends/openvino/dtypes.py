"""Which of torch's element types OpenVINO computes with, and what it makes of the others."""

import torch

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
}
"""OpenVINO's element types, by torch's (see `why_not` for others)."""

_IN_FLOAT32 = "OpenVINO computes float64 in float32"


def why_not(dtype: torch.dtype) -> str | None:
    """Why OpenVINO cannot take tensors of a dtype; None if it can."""
    if dtype in DTYPES:
        return None
    if dtype == torch.float64:
        return _IN_FLOAT32
    return f"OpenVINO does not compute with {dtype}"

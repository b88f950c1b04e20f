"""The correspondence between torch's and TensorRT's element types."""

from typing import Any

import torch

from dynamo_backends.trt import vendor

NAMES = {
    torch.bool: "BOOL",
    torch.int32: "INT32",
    torch.int64: "INT64",
    torch.float16: "HALF",
    torch.bfloat16: "BF16",
    torch.float32: "FLOAT",
}
"""What TensorRT computes with: float64 would be computed in float32, int16 not."""


def to_tensorrt(dtype: torch.dtype) -> Any:
    """TensorRT's name of a torch dtype.

    Raises:
        KeyError: There is none; see `NAMES`.
    """
    return getattr(vendor.tensorrt().DataType, NAMES[dtype])

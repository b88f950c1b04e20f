"""The correspondence between torch's and TensorRT's element types."""

from typing import Any

import torch

from dynamo_backends.trt import vendor

_NAMES = {
    torch.bool: "BOOL",
    torch.int32: "INT32",
    torch.int64: "INT64",
    torch.float16: "HALF",
    torch.bfloat16: "BF16",
    torch.float32: "FLOAT",
}


def is_supported(dtype: torch.dtype) -> bool:
    """Whether TensorRT computes with `dtype`: float64 would be computed in float32, int16 not."""
    return dtype in _NAMES


def to_tensorrt(dtype: torch.dtype) -> Any:
    """TensorRT's name of a torch dtype.

    Raises:
        KeyError: There is none; ask `is_supported` first.
    """
    return getattr(vendor.tensorrt().DataType, _NAMES[dtype])

"""Tensors as numpy arrays and back, for devices that are reached through the host's memory."""

import numpy as np
import torch
from torch import Tensor

from dynamo_backends.graph.layouts import in_row_major
from dynamo_backends.xla.dtypes import to_jax

# Types that numpy itself lacks (ml_dtypes adds them), and what torch hands their bits over as.
_CARRIERS = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


def to_numpy(tensor: Tensor) -> np.ndarray:
    """Elements as a numpy array on the host, any dtype that XLA has; shared if possible."""
    tensor = in_row_major(tensor.cpu())
    carrier = _CARRIERS.get(tensor.dtype)
    if carrier is None:
        return tensor.numpy()
    return tensor.view(carrier).numpy().view(to_jax(tensor.dtype))


def from_numpy(array: np.ndarray) -> Tensor:
    """Returns the tensor that shares a numpy array's memory, any dtype that XLA has."""
    for dtype, carrier in _CARRIERS.items():
        if array.dtype == to_jax(dtype):
            name = str(carrier).removeprefix("torch.")
            return torch.from_numpy(array.view(name)).view(dtype)
    return torch.from_numpy(array)

"""Memory for small inputs and outputs that a runtime knows already.

Telling a runtime where a tensor is takes some microseconds, copying a few kilobytes takes less. A
call uses such memory alone, so that calls in several threads do not meet.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dynamo_backends._torch_private import disable_current_modes

LIMIT = 1 << 16  # bytes


def staging_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
    """Memory of the CPU for a tensor that is copied at each call; None: it is too large for that.

    Args:
        shape: Of the tensor, in the order of memory.
        dtype: Of the tensor.
    """
    if math.prod(shape) * dtype.itemsize > LIMIT:
        return None
    # Calls may be made in other modes than the one that the memory is made in.
    with torch.inference_mode(False), disable_current_modes():
        return torch.empty(shape, dtype=dtype, device="cpu")

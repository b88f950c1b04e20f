"""Which memory of torch's tensors XLA has returned results in, so that it can write over it again.

A tensor that a program returned has XLA's memory under it. If a later program updates it, as
decoding updates the cache that the prompt's program made, nothing needs to be moved: the buffer is
found here and donated. It lives for as long as torch has the memory.
"""

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dynamo_backends.runtime import staging
from dynamo_backends.xla.dtypes import to_jax

_returned: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def worth_noting(values: Sequence[Tensor]) -> list[int]:
    """Returns which results are so large that copying them would take longer than noting them.

    Args:
        values: Fake tensors, one per result.
    """
    sizes = [v.numel() * v.element_size() for v in values]
    return [k for k, size in enumerate(sizes) if size > staging.LIMIT]


def note(buffer: Any) -> None:
    """Notes a buffer, of XLA's CPU client, that becomes a tensor of torch's."""
    _returned[buffer.unsafe_buffer_pointer()] = buffer


def find_returned(tensor: Tensor, shape: Sequence[int]) -> Any | None:
    """Returns the buffer whose memory a tensor has, if there is one.

    Args:
        tensor: On the CPU.
        shape: In the order of memory.
    """
    buffer = _returned.get(tensor.data_ptr())
    if buffer is None or buffer.is_deleted():
        return None
    fits = buffer.shape == tuple(shape) and buffer.dtype == to_jax(tensor.dtype)
    return buffer if fits else None

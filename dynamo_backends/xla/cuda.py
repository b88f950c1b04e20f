"""Tensors and XLA's buffers on CUDA devices, which share memory."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dynamo_backends._torch_private import from_dlpack, to_dlpack
from dynamo_backends.cudagraphs.device import driver
from dynamo_backends.graph.layouts import copy_if_misaligned
from dynamo_backends.xla import _jaxlib


def import_tensors(tensors: Sequence[Tensor], handle: Any, index: int) -> list[Any]:
    """Imports row-major CUDA tensors as XLA buffers that share their memory.

    Memory that is not aligned as XLA's kernels expect is copied.

    Args:
        tensors: On the device.
        handle: XLA's name of the device.
        index: torch's.
    """
    if not tensors:
        return []
    tensors = [copy_if_misaligned(t) for t in tensors]
    stream = handle.get_stream_for_external_ready_events()
    driver().wait_outside(stream, index)
    return [_jaxlib.import_dlpack(to_dlpack(t), handle, stream) for t in tensors]


def export_buffers(buffers: Sequence[Any], index: int) -> list[Tensor]:
    """Exports XLA buffers as CUDA tensors that share their memory.

    Args:
        buffers: Buffers of XLA's, perhaps still being computed.
        index: torch's name of the device.
    """
    stream = driver().current_stream(index).cuda_stream
    return [from_dlpack(_jaxlib.export_dlpack(b, stream=stream)) for b in buffers]

"""ONNX Runtime on CUDA: what its providers are told, and how their work is ordered with torch's.

Names of options:
https://onnxruntime.ai/docs/execution-providers/CUDA-ExecutionProvider.html#configuration-options
https://onnxruntime.ai/docs/execution-providers/TensorRT-ExecutionProvider.html#configurations
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dynamo_backends.cudagraphs.device import driver
from dynamo_backends.graph.precision import Tf32Settings

CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
CPU = "CPUExecutionProvider"

Provider = tuple[str, tuple[tuple[str, str], ...]]

NO_SYNCHRONIZATION = ("disable_synchronize_execution_providers", "1")
"""Of a run: it returns when the work is launched."""

NO_HOST = ("session.disable_cpu_ep_fallback", "1")
"""Of a session: a model that would be computed in part on the host is refused."""


def cuda_provider_options(
    index: int, tf32: Tf32Settings, search: bool, graphs: bool
) -> dict[str, str]:
    """Returns the options of ONNX Runtime's CUDA provider, as names and values.

    Args:
        index: Index of the device.
        tf32: What torch allows; there is one switch for products and convolutions.
        search: Whether all algorithms for a convolution are tried (torch's `cudnn.benchmark`).
        graphs: Whether runs are recorded as a CUDA graph.
    """
    entries = {
        **_device(index),
        "use_tf32": str(int(tf32.allowed_everywhere)),
        "cudnn_conv_algo_search": "EXHAUSTIVE" if search else "HEURISTIC",
        # What torch could use as well is not taken in powers of two.
        "arena_extend_strategy": "kSameAsRequested",
    }
    return {**entries, "enable_cuda_graph": "1"} if graphs else entries


def tensorrt_provider_options(index: int, folder: Path | None, graphs: bool) -> dict[str, str]:
    """Returns the options of ONNX Runtime's TensorRT provider, as names and values.

    Args:
        index: Index of the device.
        folder: Where engines and timings are kept; None: nowhere.
        graphs: Whether runs are recorded as a CUDA graph.
    """
    entries = _device(index)
    if folder is not None:
        entries |= {
            "trt_engine_cache_enable": "1",
            "trt_engine_cache_path": str(folder),
            "trt_timing_cache_enable": "1",
            "trt_timing_cache_path": str(folder),
        }
    return {**entries, "trt_cuda_graph_enable": "1"} if graphs else entries


def _device(index: int) -> dict[str, str]:
    """Returns the device option; empty for device 0, for which ONNX Runtime may warn.

    Whoever names a device is warned at each session since 1.26, unless the provider is a plugin.
    """
    return {"device_id": str(index)} if index else {}


def add_stream_option(
    provider: str, entries: dict[str, str], device: tuple[str, int]
) -> dict[str, str]:
    """Adds the session's CUDA stream to a GPU provider's options; not to be stored."""
    if provider not in (CUDA, TENSORRT):
        return entries
    handle = session_stream(device[1]).cuda_stream
    return {**entries, "user_compute_stream": str(handle)}


def session_stream(index: int) -> Any:
    """Returns the CUDA stream on which all sessions of a device run.

    torch's default stream has the handle 0, which ONNX Runtime takes for "none given".
    """
    return driver().side_stream(index)


@contextlib.contextmanager
def ordered_with_torch(index: int) -> Iterator[None]:
    """Orders the session's stream after torch's, and torch's after it (context manager).

    The host waits for nothing. Memory of inputs and outputs is torch's, taken on the current
    stream, and that stream waits: so no memory is given away while a session uses it.
    """
    session, current = session_stream(index), driver().current_stream(index)
    session.wait_stream(current)
    try:
        yield
    finally:
        current.wait_stream(session)


def is_cudnn_benchmark_on() -> bool:
    """Returns whether torch benchmarks convolution algorithms (`cudnn.benchmark`)."""
    return bool(torch.backends.cudnn.benchmark)

"""Wraps the private API of Lazy Tensor Core.

| what | checked |
|---|---|
| `torch._lazy`: `ts_backend`, `computation`, `metrics`, `sync_multi`, `wait_device_ops` | 2.11+ |
"""

import contextlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor


def start_lazy_backend() -> None:
    """Registers torch's TorchScript backend for the device "lazy"."""
    from torch._lazy import ts_backend

    ts_backend.init()


def lazy_fallbacks() -> dict[str, int]:
    """Returns how often each operator fell back from the device "lazy" to the CPU's kernel."""
    from torch._lazy import metrics

    names = [name for name in metrics.counter_names() if name.startswith("aten::")]
    return {name: metrics.counter_value(name) for name in names}


def lazy_id(tensor: Tensor) -> int:
    """Returns a lazy tensor's unique id."""
    from torch._lazy import get_tensor_id

    return get_tensor_id(tensor)


def lazy_graph(tensors: Sequence[Tensor]) -> tuple[str, list[int], list[Any]]:
    """Returns hash, input ids and input values of lazy tensors' pending computation.

    Returns:
        The hash under which it is kept once it is compiled, and the lazy ids and the values of the
        data that it reads.
    """
    from torch._lazy import computation

    ids, values = computation.get_tensors_ts_device_data_node(list(tensors))
    return computation.get_graph_hash(list(tensors)), ids, values


def lazy_sync(tensors: Sequence[Tensor]) -> None:
    """Compiles and runs the pending computation of lazy tensors.

    Raises:
        RuntimeError: It failed.
    """
    from torch._lazy import sync_multi, wait_device_ops

    try:
        sync_multi(list(tensors), [])
    except RuntimeError:
        with contextlib.suppress(RuntimeError):
            wait_device_ops()  # else the next computation would raise it again
        raise


def lazy_run(hash: str, inputs: Sequence[Any]) -> list[Tensor]:
    """Runs the computation cached under a hash on CPU tensors.

    Raises:
        RuntimeError: There is none under that hash (any more).
    """
    from torch._lazy import computation

    return computation.run_cached_graph(hash, inputs)

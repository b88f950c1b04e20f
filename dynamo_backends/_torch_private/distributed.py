"""torch.distributed's own store, and its process groups by their names.

| what | checked |
|---|---|
| `distributed_c10d._get_default_store` | 2.13 |
| `distributed_c10d._resolve_process_group` | 2.13 |
"""

from typing import Any

import torch


def default_store() -> Any:
    """Opens a new connection to the default process group's store."""
    from torch.distributed.distributed_c10d import _get_default_store

    store: Any = _get_default_store()
    return store.clone()


def host_of(store: Any) -> str:
    """Returns the host name of the `TCPStore` behind a store; "" for other stores."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return str(getattr(store, "host", ""))


def process_group(name: str) -> Any | None:
    """Returns the process group of that name in functional collectives; None if none."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    try:
        return _resolve_process_group(name)  # type: ignore[arg-type]
    except (RuntimeError, ValueError):
        return None


def cpu_backend(group: Any) -> str:
    """Returns a process group's backend name for CPU tensors, such as "gloo"; "" if none."""
    kinds: dict[str, str] = dict(
        each.split(":") for each in torch.distributed.get_backend_config(group).split(",")
    )
    return kinds.get("cpu", "")

"""torch.distributed's own store.

| what | checked |
|---|---|
| `distributed_c10d._get_default_store` | 2.13 |
"""

from typing import Any


def default_store() -> Any:
    """The store of the default process group, on a connection of its own."""
    from torch.distributed.distributed_c10d import _get_default_store

    store: Any = _get_default_store()
    return store.clone()


def host_of(store: Any) -> str:
    """The host of the `TCPStore` behind a store; empty: it is of another kind."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return str(getattr(store, "host", ""))

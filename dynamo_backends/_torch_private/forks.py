"""Makes locks that a forked child does not inherit from threads that it lacks.

| what | checked |
|---|---|
| `threading`'s locks: `_at_fork_reinit`, `_is_owned` | Python 3.11+ |
| `torch._inductor.async_compile.AsyncCompile.pool` | 2.13 |
"""

import ctypes
import os
import sys
import threading
import weakref
from typing import Any

_locks: "weakref.WeakSet[Any]" = weakref.WeakSet()
_natives: "weakref.WeakSet[Any]" = weakref.WeakSet()


def fork_safe_lock() -> threading.Lock:
    """Returns a lock that is free in a forked child, whichever thread of the parent held it."""
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def fork_safe_rlock() -> Any:
    """Returns a reentrant lock that a forked child finds free, or held by its own thread."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def keep_alive_in_children(native: Any) -> None:
    """Keeps a vendor's object alive for ever in forked children, where freeing would hang.

    Freeing it would wait for its threads, which are not there.

    Args:
        native: Can be weakly referenced.
    """
    _natives.add(native)


def _after_fork() -> None:
    for lock in list(_locks):
        if not getattr(lock, "_is_owned", bool)():
            lock._at_fork_reinit()
    for native in list(_natives):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(native))
    _natives.clear()
    async_compile = sys.modules.get("torch._inductor.async_compile")
    pool: Any = getattr(getattr(async_compile, "AsyncCompile", None), "pool", None)
    if hasattr(pool, "cache_clear"):  # torch forgets its processes alone, not its threads
        pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

"""TorchScript's settings, which are the whole process's: changed for single calls, and put back.

Everything here holds one lock, so two graphs never change settings at the same time. TorchScript
that another thread runs meanwhile, outside this package, sees them.
"""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Literal

from dynamo_backends import _torch_private as private
from dynamo_backends._torch_private.forks import fork_safe_rlock

Fuser = Literal["nnc", "onednn"]
_lock = fork_safe_rlock()


@contextlib.contextmanager
def fusing(fuser: Fuser) -> Iterator[None]:
    """TorchScript profiles what it runs, and fuses with this compiler, inside the block."""
    with _lock, private.torchscript_fuser(nnc=fuser == "nnc", onednn=fuser == "onednn"):
        yield


@contextlib.contextmanager
def without_deprecations() -> Iterator[None]:
    """TorchScript's own functions do not warn that they are deprecated.

    Up to torch 2.13 these are `DeprecationWarning`s, from 2.14 on `FutureWarning`s.
    """
    with _lock, warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            warnings.filterwarnings("ignore", "^`?torch\\.jit", category)
        yield


def onednn_graph_is_there() -> bool:
    """See `_torch_private.has_onednn_graph`, which changes a setting for a moment."""
    with _lock:
        return private.has_onednn_graph()

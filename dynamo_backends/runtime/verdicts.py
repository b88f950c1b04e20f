"""What vendors were found to compute as eager does: kept for the process, and on disk.

A trial compiles and runs a call, which takes longer than compiling the graph that it is part of.
So a second process, and a second graph with the same kinds of calls, ask the disk first.
"""

import functools
import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from dynamo_backends._torch_private import disable_current_modes
from dynamo_backends.interface.backend import Support
from dynamo_backends.interface.registry import get_backend
from dynamo_backends.runtime.cache import DiskCache, cache_folder, source_digest
from dynamo_backends.runtime.processor import processor

FOLDER = "verdicts"
"""In the cache folder."""

_LIMIT = 64 << 20  # bytes


@dataclass(frozen=True)
class Verdict:
    """How calls of a kind are to be lowered.

    Attributes:
        reason: Why they stay in eager; empty: the vendor takes them.
        decomposed: They have to be decomposed first.
    """

    reason: str = ""
    decomposed: bool = False

    @property
    def support(self) -> Support:
        """The same as an answer of `Backend.supports`."""
        return Support(not self.reason, self.reason, self.decomposed)


class Verdicts:
    """The verdicts on one vendor.

    They hold for the versions of its packages, of torch and of this package, and for the processor.

    Args:
        backend: Name of the vendor's backend.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._known: dict[str, Verdict] = {}
        self._lock = threading.RLock()

    def __call__(self, kind: str, find: Callable[[], Verdict], keep: bool) -> Verdict:
        """The verdict on a kind of call, which `find` gives the first time.

        Args:
            kind: See `trials.kind_of`; with everything else that the verdict depends on.
            find: Makes the trial.
            keep: Whether to look on disk, and to keep there what was found.
        """
        with self._lock:
            verdict = self.get(kind, keep)
            if verdict is None:
                with disable_current_modes(), torch.no_grad():
                    verdict = find()
                self.put(kind, verdict, keep)
            return verdict

    def get(self, kind: str, keep: bool) -> Verdict | None:
        """The verdict on a kind of call; None if there is none yet."""
        verdict = self._known.get(kind)
        if verdict is None and keep:
            parts = _cache().get(self._key(kind))
            if parts is not None:
                verdict = self._known[kind] = Verdict(**json.loads(parts["verdict"]))
        return verdict

    def put(self, kind: str, verdict: Verdict, keep: bool) -> None:
        """Keeps the verdict on a kind of call."""
        self._known[kind] = verdict
        if keep:
            _cache().put(self._key(kind), {"verdict": json.dumps(asdict(verdict)).encode()})

    def _key(self, kind: str) -> str:
        return hashlib.sha256(f"{self._holds_for} {kind}".encode()).hexdigest()

    @functools.cached_property
    def _holds_for(self) -> str:
        versions = get_backend(self._backend).versions()
        return f"{versions} {torch.__version__} {source_digest()} {processor()}"


def _cache() -> DiskCache:
    return DiskCache(cache_folder() / FOLDER, _LIMIT, what="verdicts of trials")

"""Caches verdicts of trials on operator calls, in memory and on disk.

A trial compiles and runs a call, and those of a graph may take longer than compiling it does. So a
second graph with the same kinds of calls asks the process first, a second process the disk, and
one that finds nothing there the table that comes with the package (`shipped_verdicts.py`). A
verdict from elsewhere may be wrong here; the first call of each program is compared with eager.
"""

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict
from typing import TypeVar

import torch

from dynamo_backends._torch_private import disable_current_modes
from dynamo_backends._torch_private.forks import fork_safe_rlock
from dynamo_backends.interface.counters import TRIALS, time_stage
from dynamo_backends.interface.errors import TrialNeededError
from dynamo_backends.interface.registry import get_backend
from dynamo_backends.runtime.cache import DiskCache, cache_folder, source_digest
from dynamo_backends.runtime.compile_journal import ENDED, CompileJournalEntry, CompileOutcome
from dynamo_backends.runtime.cpu_info import cpu_cache_key, cpu_isa_level
from dynamo_backends.runtime.shipped_verdicts import (
    TrialVerdict,
    VerdictConditions,
    load_shipped_verdicts,
)

FOLDER = "verdicts"
"""In the cache folder."""

_LIMIT = 64 << 20  # bytes

T = TypeVar("T")

_makes_trials = ContextVar("makes_trials", default=True)


@contextlib.contextmanager
def forbid_trials() -> Iterator[None]:
    """Raises `TrialNeededError` instead of running trials (context manager)."""
    token = _makes_trials.set(False)
    try:
        yield
    finally:
        _makes_trials.reset(token)


# What decides a verdict besides the vendor's own folders: trials, and what lowers and decomposes.
_DECIDES = (
    "verify/trials",
    "verify/mismatch.py",
    "verify/reference.py",
    "graph/attention_decompositions.py",
    "graph/call_tracing.py",
    "graph/call_arguments.py",
    "graph/constant_evaluation.py",
    "graph/call_decomposition.py",
    "graph/decomposition_tables.py",
    "graph/layouts.py",
    "graph/legalize.py",
    "graph/masked_attention.py",
    "graph/planned_decomposition.py",
    "graph/transformer_decompositions.py",
)

_DO_NOT = (
    "backend.py",
    "cuda.py",
    "quantized.py",
    "ranged.py",
    "runtime.py",
    "saving.py",
    "vendor.py",
)
"""Files in the vendors' folders on which no verdict depends: options, other devices, int8, files
that users ask for, and what carries tensors to a compiled call and back."""


class VerdictStore:
    """The cached trial verdicts on one vendor's operator calls.

    They hold for the versions of its packages and of torch, for the processor, and for the code of
    this package that makes trials and lowers calls.

    Args:
        backend: Name of the vendor's backend.
        sources: Folders of the package that hold the vendor's own such code.
        shipped: Whether the table that comes with the package is asked.
    """

    def __init__(self, backend: str, sources: Sequence[str], shipped: bool = True) -> None:
        self._backend = backend
        self.sources = tuple(sources)
        self._shipped = shipped
        self._known: dict[str, TrialVerdict] = {}
        self._lock = fork_safe_rlock()

    def __call__(self, kind: str, find: Callable[[], TrialVerdict], keep: bool) -> TrialVerdict:
        """Returns the verdict on a kind of call, which `find` gives the first time.

        Args:
            kind: See `trials.kind_of`; with everything else that the verdict depends on.
            find: Makes the trial.
            keep: Whether to look on disk, and to keep there what was found.
        """
        with self._lock:
            verdict = self.get(kind, keep)
            if verdict is None:
                with time_stage(TRIALS), disable_current_modes(), torch.no_grad():
                    verdict = self._tried(kind, find) if keep else find()
                self.put(kind, verdict, keep)
            return verdict

    def _tried(self, kind: str, find: Callable[[], TrialVerdict]) -> TrialVerdict:
        """Returns a verdict by a trial, unless one has ended a process."""
        journal = CompileJournalEntry(self._key(kind))
        if journal.outcome is not CompileOutcome.UNKNOWN:
            return TrialVerdict(ENDED)
        with journal.note_running():
            return find()

    def find_in_batch(
        self,
        calls: Mapping[str, T],
        find: Callable[[Mapping[str, T]], Mapping[str, TrialVerdict]],
        keep: bool,
    ) -> None:
        """Finds verdicts on several kinds of calls in one trial, where possible.

        Args:
            calls: One of each kind, by that.
            find: Is given those that there is no verdict on, and gives verdicts on some.
            keep: See `__call__`.
        """
        if not _makes_trials.get():
            return
        with self._lock:
            unknown = {kind: call for kind, call in calls.items() if self.get(kind, keep) is None}
            if len(unknown) < 2:
                return
            with time_stage(TRIALS), disable_current_modes(), torch.no_grad():
                found = find(unknown)
            for kind, verdict in found.items():
                self.put(kind, verdict, keep)

    def get(self, kind: str, keep: bool) -> TrialVerdict | None:
        """Returns the verdict on a kind of call; None if there is none.

        Raises:
            TrialNeededError: There is none, and the thread is to make no trials.
        """
        verdict = self._known.get(kind)
        if verdict is None and keep:
            parts = _cache().get(self._key(kind))
            if parts is not None:
                verdict = self._known[kind] = TrialVerdict(**json.loads(parts["verdict"]))
        if verdict is None and self._shipped:
            verdict = self._table.get(kind)
        if verdict is None and not _makes_trials.get():
            raise TrialNeededError(f"{self._backend} has to run a trial of an operator: {kind}")
        return verdict

    def put(self, kind: str, verdict: TrialVerdict, keep: bool) -> None:
        """Stores the verdict on a kind of call."""
        self._known[kind] = verdict
        if keep:
            _cache().put(self._key(kind), {"verdict": json.dumps(asdict(verdict)).encode()})

    def _key(self, kind: str) -> str:
        return hashlib.sha256(f"{self._holds_for} {kind}".encode()).hexdigest()

    @property
    def known_verdicts(self) -> Mapping[str, TrialVerdict]:
        """The verdicts that this process found by trials or read from disk."""
        return dict(self._known)

    def current_conditions(self) -> VerdictConditions:
        """Returns the versions, CPU and source digest of this process."""
        return VerdictConditions(
            get_backend(self._backend).versions(),
            ".".join(torch.__version__.split(".")[:2]),
            cpu_isa_level(),
            source_digest(*self.sources, *_DECIDES, without=_DO_NOT),
        )

    @functools.cached_property
    def _table(self) -> Mapping[str, TrialVerdict]:
        return load_shipped_verdicts(self._backend, self.current_conditions())

    @functools.cached_property
    def _holds_for(self) -> str:
        return f"{self.current_conditions()} {torch.__version__} {cpu_cache_key()}"


def _cache() -> DiskCache:
    return DiskCache(cache_folder() / FOLDER, _LIMIT, what="results of operator trials")

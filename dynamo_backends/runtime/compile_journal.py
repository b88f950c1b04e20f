"""Records on disk which compilations crashed the process that ran them.

A vendor's compiler may crash, and takes the process with it. So an entry is written before it is
called in the process of the calls, and removed afterwards. An entry of a process that lives no
more says that the same compilation may end this one, too.
"""

import contextlib
import enum
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from dynamo_backends.runtime.cache import DiskCache, cache_folder

FOLDER = "compiling"
"""In the cache folder."""

ENDED = "an earlier compilation of it crashed the process"
"""Why something is left to eager."""

_LIMIT = 4 << 20  # bytes


class CompileOutcome(enum.Enum):
    """What the journal knows about a compilation.

    Attributes:
        UNKNOWN: Nothing, or it was completed.
        INTERRUPTED: The process that ran it has ended meanwhile: it crashed, or was killed.
        CRASHED: It crashed again in a process of its own.
    """

    UNKNOWN = "unknown"
    INTERRUPTED = "interrupted"
    CRASHED = "crashed"


class CompileJournalEntry:
    """The journal entry of one compilation.

    Args:
        subject: What is compiled, by what: all that decides whether the compiler crashes.
    """

    def __init__(self, subject: str):
        self._key = hashlib.sha256(subject.encode()).hexdigest()

    @property
    def outcome(self) -> CompileOutcome:
        """The outcome that earlier processes recorded."""
        parts = _cache().get(self._key)
        if parts is None:
            return CompileOutcome.UNKNOWN
        entry = json.loads(parts["entry"])
        if entry["outcome"] == CompileOutcome.CRASHED.value:
            return CompileOutcome.CRASHED
        is_alive = entry["process"] == [entry["process"][0], _started(entry["process"][0])]
        return CompileOutcome.UNKNOWN if is_alive else CompileOutcome.INTERRUPTED

    @contextlib.contextmanager
    def note_running(self) -> Iterator[None]:
        """Marks the compilation as running in this process (context manager)."""
        pid = os.getpid()
        self._put(CompileOutcome.INTERRUPTED, [pid, _started(pid)])
        try:
            yield
        finally:
            self.clear()

    def note_crash(self) -> None:
        """Records that the compilation crashed the compiler process."""
        self._put(CompileOutcome.CRASHED, [0, None])

    def clear(self) -> None:
        """Removes the entry: the compilation did not crash."""
        _cache().drop(self._key)

    def _put(self, outcome: CompileOutcome, process: list[object]) -> None:
        entry = {"outcome": outcome.value, "process": process}
        _cache().put(self._key, {"entry": json.dumps(entry).encode()})


def _started(pid: int) -> str | None:
    """Returns when a process started, if the system tells; None: there is no such process."""
    with contextlib.suppress(OSError, IndexError):
        # The second field is a name in parentheses, which may have blanks.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return "running"


def _cache() -> DiskCache:
    return DiskCache(cache_folder() / FOLDER, _LIMIT, what="compilations that crash")

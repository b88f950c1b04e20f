"""Folders for what a process needs for a while; those of processes that have ended are removed.

A process holds a lock on a file in its folder, which the system releases when the process ends,
however that happens. Locks hold among containers that share a folder, too; process ids do not.
"""

import contextlib
import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from dynamo_backends.runtime.private_folder import open_private

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_LOCK = "lock"
_ABANDONED_S = 24 * 3600.0
"""Folders that are not locked, or on systems without locks, are removed after so many seconds."""


@contextlib.contextmanager
def process_folder(root: Path) -> Iterator[Path]:
    """A new folder in `root`, removed at the end, together with `root` once that is empty.

    Raises:
        OSError: It cannot be made, or others could write to it.
    """
    with open_private(root.parent, create=True):
        pass
    guard = root.with_name(f"{root.name}.lock")
    with _locked(guard), open_private(root, create=True):
        for other in root.iterdir():
            if _is_abandoned(other):
                shutil.rmtree(other, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(dir=root))
        lock = contextlib.ExitStack()
        lock.enter_context(_locked(folder / _LOCK))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()
        with contextlib.suppress(OSError), _locked(guard):
            root.rmdir()  # if it is empty


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock, where the file system has locks."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
    try:
        if fcntl is None:
            yield
            return
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:  # a forked child has the descriptor, too, and would keep the lock
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)
    finally:
        os.close(handle)


def _is_abandoned(folder: Path) -> bool:
    """Returns whether no process uses a folder."""
    try:
        handle = os.open(folder / _LOCK, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return _is_old(folder)
    try:
        if fcntl is None:
            return _is_old(folder)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES) and _is_old(folder)
    finally:
        os.close(handle)
    return True


def _is_old(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return time.time() - folder.stat().st_mtime > _ABANDONED_S
    return False

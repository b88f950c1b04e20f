"""Defines the disk cache, atomic and limited in size, and an in-memory LRU cache.

An entry is one file: a magic line, the SHA-256 of the rest, a JSON header with the names and
sizes of its parts, and the parts. A damaged entry is dropped and rebuilt. Writers make a temporary
file and rename it, so that readers in other processes see a whole entry or none.

Entries hold machine code, so nobody else may write to the folder or replace it (`private_folder`).
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import tempfile
from collections import OrderedDict
from collections.abc import Hashable, Mapping, ValuesView
from pathlib import Path
from typing import Generic, TypeVar

import platformdirs

from dynamo_backends.runtime.private_folder import (
    NotPrivateError,
    PrivateFolder,
    open_private_folder,
)

log = logging.getLogger("dynamo_backends")

_MAGIC = b"dynamo-backends cache 1\n"
_DIGEST = 32
_SUFFIX = ".bin"
DEFAULT_LIMIT = 4 << 30

_PARTS = 16
"""A folder is looked through again after so small a part of its limit was written."""

_room: dict[tuple[Path, int], int] = {}
"""For each folder and limit: bytes that this process may write before it looks through it again."""


def cache_folder() -> Path:
    """Returns `DYNAMO_BACKENDS_CACHE`, or the platform's user cache folder."""
    given = os.environ.get("DYNAMO_BACKENDS_CACHE")
    folder = given or platformdirs.user_cache_dir("dynamo-backends")
    return Path(os.path.expanduser(folder))


def vendor_folder(name: str) -> Path | None:
    """Creates a cache subfolder for a vendor; None if others can write to it."""
    folder = cache_folder() / name
    try:
        with open_private_folder(folder, create=True):
            return folder
    except OSError as error:
        _warn_once(f"the folder {folder} is not used: {error}")
        return None


class DiskCache:
    """A folder of cache entries, limited in bytes.

    Args:
        folder: Made on first use.
        limit: Bytes that all entries may take; the least recently used are dropped beyond it, and a
            sixteenth of the limit with them.
        what: Is kept there, for warnings.
    """

    def __init__(self, folder: Path, limit: int = DEFAULT_LIMIT, what: str = "compiled graphs"):
        self.folder = folder
        self._limit = limit
        self._what = what

    def get(self, key: str) -> dict[str, bytes] | None:
        """Returns an entry's parts; None if it is missing or damaged."""
        data = self.read_file(self._name(key))
        if data is None:
            return None
        parts = _decode(data)
        if parts is None:
            log.warning("dropped a damaged cache entry: %s", self.folder / self._name(key))
            self.drop(key)
        return parts

    def put(self, key: str, parts: Mapping[str, bytes]) -> bool:
        """Stores an entry; False if the folder cannot be used, with one warning."""
        return self.write_file(self._name(key), _encode(parts))

    def read_file(self, name: str) -> bytes | None:
        """Reads a file that is not an entry; None if missing or the folder is unusable."""
        try:
            with open_private_folder(self.folder) as folder:
                return folder.read(name)
        except NotPrivateError as error:
            self._warn(error)
        except OSError:
            pass
        return None

    def write_file(self, name: str, data: bytes) -> bool:
        """Writes a file that is not an entry; False if the folder cannot be used."""
        try:
            with open_private_folder(self.folder, create=True) as folder:
                folder.write(name, data)
                if name.endswith(_SUFFIX):
                    self._make_room(folder, len(data))
        except NotPrivateError as error:
            self._warn(error)
            return False
        except OSError as error:
            _warn_once(f"{self._what} are not saved to the disk cache: {error}")
            return False
        return True

    def drop(self, key: str) -> None:
        """Removes an entry; ignores errors."""
        self.remove_file(self._name(key))

    def remove_file(self, name: str) -> None:
        """Removes a file by name; ignores errors."""
        with contextlib.suppress(OSError), open_private_folder(self.folder) as folder:
            folder.remove(name)

    def list_files(self, suffix: str) -> list[str]:
        """Returns names of files with a suffix, sorted; empty if the folder is unusable."""
        with contextlib.suppress(OSError), open_private_folder(self.folder) as folder:
            return sorted(name for name, _ in folder.files() if name.endswith(suffix))
        return []

    def size(self) -> int:
        """Returns the total bytes of all entries."""
        with contextlib.suppress(OSError), open_private_folder(self.folder) as folder:
            return sum(size for _, size, _ in _entries(folder))
        return 0

    def _name(self, key: str) -> str:
        return f"{key}{_SUFFIX}"

    def _make_room(self, folder: PrivateFolder, written: int) -> None:
        """Drops entries beyond the limit, where there may be any.

        Looking through a folder takes the longer the more entries it has. So it is done at the
        first write of a process, and again once a part of the limit was written: others write, too.
        """
        place = self.folder, self._limit
        room = _room.get(place, 0) - written
        _room[place] = (
            room if room >= 0 else self._trim(folder)
        )  # threads may lose a write: no harm

    def _trim(self, folder: PrivateFolder) -> int:
        """Drops entries beyond the limit; how many bytes may be written before the next time."""
        part = self._limit // _PARTS
        entries = sorted(_entries(folder))
        total = sum(size for _, size, _ in entries)
        goal = self._limit - part if total > self._limit else total
        for _, size, name in entries:
            if total <= goal:
                break
            with contextlib.suppress(OSError):
                folder.remove(name)
                total -= size
        return min(part, self._limit - total)

    def _warn(self, error: NotPrivateError) -> None:
        _warn_once(f"the cache folder {self.folder} is not used: {error}")


def _entries(folder: PrivateFolder) -> list[tuple[float, int, str]]:
    """Yields for each entry when it was last used, its bytes and its name."""
    files = folder.files()
    return [(i.st_mtime, i.st_size, name) for name, i in files if name.endswith(_SUFFIX)]


def write_file_atomically(path: Path, data: bytes) -> None:
    """Writes a file by rename, so that readers never see it incomplete."""
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


@functools.cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)


def _encode(parts: Mapping[str, bytes]) -> bytes:
    header = json.dumps({name: len(part) for name, part in parts.items()}).encode()
    body = len(header).to_bytes(8, "little") + header + b"".join(parts.values())
    return _MAGIC + hashlib.sha256(body).digest() + body


def _decode(data: bytes) -> dict[str, bytes] | None:
    start = len(_MAGIC) + _DIGEST
    body = memoryview(data)[start:]
    if not data.startswith(_MAGIC) or len(body) < 8:
        return None
    if hashlib.sha256(body).digest() != data[len(_MAGIC) : start]:
        return None
    length = int.from_bytes(body[:8], "little")
    sizes = json.loads(bytes(body[8 : 8 + length]))
    parts, at = {}, 8 + length
    for name, size in sizes.items():
        parts[name] = bytes(body[at : at + size])
        at += size
    return parts


@functools.cache
def source_digest(*parts: str, without: tuple[str, ...] = ()) -> str:
    """Returns a hash of this package's source files, for cache keys.

    Args:
        parts: Files and folders of the package; none: all of it.
        without: Names of files that do not count.
    """
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parent.parent
    wanted = [root / part for part in parts] or [root]
    for path in sorted(p for w in wanted for p in ([w] if w.is_file() else w.rglob("*.py"))):
        if path.name in without:
            continue
        digest.update(f"{path.relative_to(root)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class LRU(Generic[Key, Value]):
    """A mapping that evicts the least recently used values.

    Looking a value up takes no lock: between two threads it may be missed, and is made again.

    Args:
        most: Number of values to keep.
    """

    def __init__(self, most: int):
        self.most = most
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def __len__(self) -> int:
        """Returns the number of entries."""
        return len(self._values)

    def __contains__(self, key: Key) -> bool:
        """Returns whether there is a value of a key; to ask is no use of it."""
        return key in self._values

    def values(self) -> ValuesView[Value]:
        """Returns values, least recently used first, without marking them used."""
        return self._values.values()

    def get(self, key: Key) -> Value | None:
        """Returns a value and marks it used; None if missing."""
        try:
            self._values.move_to_end(key)
            return self._values[key]
        except KeyError:
            return None

    def put(self, key: Key, value: Value) -> None:
        """Stores a value, and evicts the least recently used ones above the limit."""
        self._values[key] = value
        self._values.move_to_end(key)
        while len(self._values) > self.most:
            self._values.popitem(last=False)

    def drop(self, key: Key) -> bool:
        """Removes a key; returns whether it was there."""
        return self._values.pop(key, None) is not None

    def clear(self) -> None:
        """Removes all values."""
        self._values.clear()

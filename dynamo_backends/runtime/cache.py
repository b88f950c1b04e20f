"""Compiled executables, and what else is kept on disk: atomic, checked, limited in size.

An entry is one file: a magic line, the SHA-256 of the rest, a JSON header with the names and
sizes of its parts, and the parts. A damaged entry is dropped and rebuilt. Writers make a temporary
file and rename it, so that readers in other processes see a whole entry or none.

Entries hold machine code and pickles, so the folder must belong to this user and be writable by
nobody else.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

import platformdirs

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
    """`DYNAMO_BACKENDS_CACHE`, or the user's cache folder of the platform."""
    given = os.environ.get("DYNAMO_BACKENDS_CACHE")
    return Path(given) if given else Path(platformdirs.user_cache_dir("dynamo-backends"))


class DiskCache:
    """A folder of entries.

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
        """The parts stored under a key; None if there is no intact entry."""
        path = self._path(key)
        try:
            if not self.is_private():
                return None
            data = path.read_bytes()
        except OSError:
            return None
        parts = _decode(data)
        if parts is None:
            log.warning("dropped a damaged cache entry: %s", path)
            self.drop(key)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return parts

    def put(self, key: str, parts: Mapping[str, bytes]) -> bool:
        """Stores parts under a key; False, with one warning, where the folder cannot be used."""
        return self.write(self._path(key).name, _encode(parts))

    def write(self, name: str, data: bytes) -> bool:
        """Writes a file of another form into the folder; returns what `put` does."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not self.is_private():
                return False
            write_whole(self.folder / name, data)
            if name.endswith(_SUFFIX):
                self._make_room(len(data))
        except OSError as error:
            _warn_once(f"{self._what} are not kept on disk: {error}")
            return False
        return True

    def drop(self, key: str) -> None:
        """Removes an entry, if it is there and can be removed."""
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def size(self) -> int:
        """Bytes that all entries take."""
        return sum(size for _, size, _ in self._entries())

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    def _entries(self) -> list[tuple[float, int, Path]]:
        found = []
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.folder):
                with contextlib.suppress(OSError):
                    if entry.name.endswith(_SUFFIX):
                        info = entry.stat()
                        found.append((info.st_mtime, info.st_size, Path(entry.path)))
        return found

    def _make_room(self, written: int) -> None:
        """Drops entries beyond the limit, where there may be any.

        Looking through a folder takes the longer the more entries it has. So it is done at the
        first write of a process, and again once a part of the limit was written: others write, too.
        """
        place = self.folder, self._limit
        room = _room.get(place, 0) - written
        _room[place] = room if room >= 0 else self._trim()  # threads may lose a write: no harm

    def _trim(self) -> int:
        """Drops entries beyond the limit; how many bytes may be written before the next time."""
        part = self._limit // _PARTS
        entries = sorted(self._entries())
        total = sum(size for _, size, _ in entries)
        goal = self._limit - part if total > self._limit else total
        for _, size, path in entries:
            if total <= goal:
                break
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size
        return min(part, self._limit - total)

    def is_private(self) -> bool:
        """Whether the folder belongs to this user and nobody else can write to it; or a warning."""
        if os.name != "posix":
            return True
        info = self.folder.stat()
        if info.st_uid == os.geteuid() and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return True
        _warn_once(
            f"the cache folder {self.folder} is not used, because others can write to it; "
            f"run: chmod go-w {self.folder} (or set DYNAMO_BACKENDS_CACHE to a folder of yours)"
        )
        return False


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file; readers see all of it, or what was there before."""
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
    """A hash of this package's own source: compiled graphs depend on the code that lowered them.

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

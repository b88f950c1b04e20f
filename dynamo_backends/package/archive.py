"""The file: a zip of parts that are stored as they are, with their SHA-256 in a manifest.

Reading one trusts nothing in it. Parts are not compressed, so that a file has no more content than
it is long; names are looked up and never become paths; nothing is unpickled. Large parts have a
checksum for each 16 MiB, so that several threads read one. They are mapped into memory rather than
copied, so a package is replaced by another file, as `write` does, and never written over.
"""

import contextlib
import hashlib
import json
import mmap
import os
import re
import struct
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from dynamo_backends.graph.layouts import ALIGNMENT
from dynamo_backends.interface.errors import PackageError
from dynamo_backends.runtime.private_folder import open_file

FORMAT = 2
MANIFEST = "manifest.json"
_DIGEST = "manifest.sha256"

_NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9]+)?(/[a-z0-9_]+(\.[a-z0-9]+)?)*")
_MOST = 100_000  # parts
_LONGEST = 64 << 20  # bytes of the manifest
_CHUNK = 16 << 20  # bytes with a checksum of their own
_THREADS = 4

MAPPED = 1 << 20
"""Least bytes of parts that are mapped into memory, if the system can; others are read."""

_HEADER = struct.Struct("<4s22xHH")  # of a part: what it is, lengths of its name and of extras
_EXTRA = struct.Struct("<HH")  # of a part: what an entry of the extras is, and its length
_GAP = 0xD935  # what Android's zipalign calls the extras that only fill
_ZIP64 = 20  # bytes that zipfile adds to the extras of a very large part
_BROKEN = (zipfile.BadZipFile, EOFError, RuntimeError, NotImplementedError, struct.error)

Path_ = str | os.PathLike[str]


def write(path: Path_, manifest: Mapping[str, Any], parts: Mapping[str, bytes]) -> None:
    """Writes a package; who reads the path meanwhile sees all of it, or what was there before.

    Args:
        path: Path of the file; it is replaced if it exists.
        manifest: What is in it, in types that JSON has; the list of parts is added.
        parts: Contents by name.
    """
    listed = {name: {"size": len(p), "sha256": _digests(p)} for name, p in parts.items()}
    text = json.dumps({"format": FORMAT, **manifest, "parts": listed}, indent=1).encode()
    handle, temporary = tempfile.mkstemp(dir=Path(path).parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w") as made:
            for name, part in {MANIFEST: text, _DIGEST: sha256(text).encode(), **parts}.items():
                made.writestr(_entry(name, len(part), file.tell()), part)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _entry(name: str, size: int, offset: int) -> zipfile.ZipInfo:
    """Makes the entry of a part, stored uncompressed; a large one is aligned for mapping."""
    info = zipfile.ZipInfo(name)
    if size >= MAPPED:
        before = offset + _HEADER.size + len(name) + _EXTRA.size
        before += _ZIP64 if size * 1.05 > zipfile.ZIP64_LIMIT else 0
        gap = -before % ALIGNMENT
        info.extra = _EXTRA.pack(_GAP, gap) + bytes(gap)
    return info


class Archive:
    """A package that is open for reading.

    Args:
        path: Path of the file.

    Attributes:
        path: Path of the file.
        manifest: What was written.
        digest: Digest of the manifest, which has the checksums of all parts.

    Raises:
        PackageError: It is no package, is damaged, or is of a format that is not known here.
    """

    def __init__(self, path: Path_):
        self.path = Path(os.path.expanduser(path))
        with self._explained(), contextlib.ExitStack() as opened:
            self._file = opened.enter_context(os.fdopen(open_file(self.path), "rb"))
            self._reading = threading.Lock()
            self._ahead = dict[str, Future[Tensor]]()
            self._beside = opened.enter_context(ThreadPoolExecutor(1))
            self._zip = opened.enter_context(zipfile.ZipFile(self._file))
            self._entries = self._checked_entries()
            self.manifest: dict[str, Any] = self._checked_manifest()
            self._close = opened.pop_all()

    def __enter__(self) -> Self:
        """Returns the archive itself, for `with`."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the file."""
        self._close.close()

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each part."""
        return {name: entry["size"] for name, entry in self.manifest["parts"].items()}

    def read(self, name: str) -> bytes:
        """Returns a part, whose checksums are right.

        Raises:
            PackageError: It is missing or damaged.
        """
        return self.read_memory(name).numpy().tobytes()

    def read_ahead(self, name: str) -> None:
        """Begins to read a part in another thread; `read_memory` returns it."""
        self._ahead[name] = self._beside.submit(self._read, name)

    def read_memory(self, name: str) -> Tensor:
        """Returns a part, whose checksums are right, as bytes of a tensor.

        Raises:
            PackageError: It is missing or damaged.
        """
        begun = self._ahead.pop(name, None)
        return self._read(name) if begun is None else begun.result()

    def _read(self, name: str) -> Tensor:
        with self._explained():
            known = self.manifest["parts"].get(name)
            if known is None or name not in self._entries:
                raise PackageError(f"{self.path} lacks {name!r}, which its manifest names")
            info, size, digests = self._entries[name], known["size"], known["sha256"]
            if size != info.file_size or len(digests) != -(-size // _CHUNK):
                raise self._damaged(name)
            begin = self._begin(info)
            mapped = self._mapped(begin, size)
            made = torch.empty(size, dtype=torch.uint8) if mapped is None else mapped
            self._fill(name, made.numpy().data, begin if mapped is None else None, digests)
            return made

    def _mapped(self, begin: int, size: int) -> Tensor | None:
        """Bytes of the file as memory, which takes no copy; None: they have to be read."""
        if size < MAPPED or begin % ALIGNMENT or not hasattr(mmap, "MAP_PRIVATE"):
            return None
        before = begin % mmap.ALLOCATIONGRANULARITY
        # Writable, as torch wants it: what is written there stays in this process.
        memory = mmap.mmap(
            self._file.fileno(), before + size, flags=mmap.MAP_PRIVATE, offset=begin - before
        )
        return torch.frombuffer(memory, dtype=torch.uint8)[before:]

    def _fill(self, name: str, memory: memoryview, begin: int | None, digests: list[str]) -> None:
        """Reads a part, unless it is there, and compares its checksums."""

        def fill(chunk: int) -> bool:
            at = chunk * _CHUNK
            part = memory[at : at + _CHUNK]
            count: int | None = len(part)
            if begin is not None:
                with self._reading:
                    self._file.seek(begin + at)
                    count = self._file.readinto(part)
            return count == len(part) and sha256(part) == digests[chunk]

        with ThreadPoolExecutor(_THREADS) as threads:
            run = map if len(digests) < 2 else threads.map
            if not all(run(fill, range(len(digests)))):
                raise self._damaged(name)

    def _begin(self, info: zipfile.ZipInfo) -> int:
        """Returns where the content of a part begins: behind its own header."""
        with self._reading:
            self._file.seek(info.header_offset)
            header = self._file.read(_HEADER.size)
        kind, name, extra = _HEADER.unpack(header)
        if kind != b"PK\3\4":
            raise self._damaged(info.filename)
        return info.header_offset + _HEADER.size + int(name) + int(extra)

    def _damaged(self, name: str) -> PackageError:
        return PackageError(
            f"{self.path} is damaged: the checksum of {name} is wrong. Save it again, or copy it "
            "again."
        )

    def _checked_entries(self) -> dict[str, zipfile.ZipInfo]:
        found: dict[str, zipfile.ZipInfo] = {}
        infos = self._zip.infolist()
        for info in infos:
            if not _NAME.fullmatch(info.filename) or info.filename in found:
                raise PackageError(
                    f"{self.path} is not a valid package: it contains an unexpected part, "
                    f"{info.filename!r}"
                )
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise PackageError(
                    f"{self.path} is not a valid package: {info.filename!r} is compressed"
                )
            found[info.filename] = info
        content = sum(info.file_size for info in infos)
        if len(infos) > _MOST or content > self.path.stat().st_size:
            raise PackageError(
                f"{self.path} is not a valid package: the sizes of its parts exceed the file size"
            )
        return found

    def _checked_manifest(self) -> dict[str, Any]:
        if MANIFEST not in self._entries or _DIGEST not in self._entries:
            raise PackageError(f"{self.path} is not a valid package: it has no manifest")
        if self._entries[MANIFEST].file_size > _LONGEST:
            raise PackageError(f"{self.path} is not a valid package: its manifest is too large")
        text = self._zip.read(MANIFEST)
        self.digest = sha256(text)
        if self._zip.read(_DIGEST) != self.digest.encode():
            raise PackageError(
                f"{self.path} is damaged: the checksum of the manifest is wrong. Save it again, or "
                "copy it again."
            )
        manifest: dict[str, Any] = json.loads(text)
        if manifest["format"] != FORMAT:
            raise PackageError(
                f"{self.path} has format {manifest['format']}, but this version of dynamo_backends "
                f"reads format {FORMAT}. Save it again with this version."
            )
        missing = manifest["parts"].keys() - self._entries.keys()
        if missing:
            raise PackageError(f"{self.path} lacks {sorted(missing)}, which its manifest names")
        return manifest

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except PackageError:
            raise
        except FileNotFoundError as error:
            raise PackageError(f"there is no file {self.path}") from error
        except (*_BROKEN, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise PackageError(f"{self.path} is damaged or not a package: {error}") from error


def sha256(content: bytes | memoryview) -> str:
    """Returns a checksum as text."""
    return hashlib.sha256(content).hexdigest()


def _digests(part: bytes) -> list[str]:
    content = memoryview(part)
    return [sha256(content[at : at + _CHUNK]) for at in range(0, len(content), _CHUNK)]

"""Opens folders that no other user can write to.

A path is followed from the root, one folder at a time, by descriptors: what was checked is what is
used, whoever renames folders meanwhile. Each folder on the way belongs to this user or to root, and
others cannot write to it, or it is sticky, as /tmp is, so that they cannot replace what is not
theirs. The last one belongs to this user, and to nobody else.

Where the system has no such owners (Windows), paths are used as they are.
"""

import contextlib
import errno
import functools
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_HAS_OWNERS = os.name == "posix" and os.open in os.supports_dir_fd
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_SEARCH = getattr(os, "O_PATH", getattr(os, "O_SEARCH", os.O_RDONLY))  # parents may be unreadable
_FOLDER = _SEARCH | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
_FILE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_MOST_LINKS = 40  # as Linux


class NotPrivateError(PermissionError):
    """Another user can write to a folder or replace it."""


class PrivateFolder:
    """An open folder that only this user can write to.

    Args:
        path: Path of the folder.
        descriptor: Descriptor of the folder; None: files are looked up by their paths.
    """

    def __init__(self, path: Path, descriptor: int | None):
        self._path = path
        self._descriptor = descriptor

    def read(self, name: str) -> bytes:
        """Reads a file and updates its time of last use.

        Raises:
            OSError: It is not there, or no file: a link, a pipe or a device.
        """
        handle = os.open(self._at(name), os.O_RDONLY | _FILE, dir_fd=self._descriptor)
        with os.fdopen(handle, "rb") as file:
            require_regular_file(handle, self._path / name)
            data = file.read()
        with contextlib.suppress(OSError):
            os.utime(self._at(name), dir_fd=self._descriptor)
        return data

    def write(self, name: str, data: bytes) -> None:
        """Writes a file by rename, so that readers never see it incomplete."""
        temporary = f"{os.urandom(8).hex()}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE
        handle = os.open(self._at(temporary), flags, 0o600, dir_fd=self._descriptor)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            at = self._descriptor
            os.replace(self._at(temporary), self._at(name), src_dir_fd=at, dst_dir_fd=at)
        except BaseException:
            with contextlib.suppress(OSError):
                self.remove(temporary)
            raise

    def remove(self, name: str) -> None:
        """Removes a file of the folder, if it exists."""
        os.unlink(self._at(name), dir_fd=self._descriptor)

    def files(self) -> list[tuple[str, os.stat_result]]:
        """Returns names and stat results of regular files."""
        found = []
        with self._readable() as place, os.scandir(place) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    info = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(info.st_mode):
                        found.append((entry.name, info))
        return found

    @contextlib.contextmanager
    def _readable(self) -> Iterator[Path | int]:
        if self._descriptor is None:
            yield self._path
            return
        handle = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._descriptor)
        try:
            yield handle
        finally:
            os.close(handle)

    def _at(self, name: str) -> str:
        return name if self._descriptor is not None else os.fspath(self._path / name)


@contextlib.contextmanager
def open_private_folder(path: Path, create: bool = False) -> Iterator[PrivateFolder]:
    """Opens a folder; raises NotPrivateError if others can write (context manager).

    Args:
        path: Path of the folder.
        create: Whether to make it, and folders that it is in, for this user alone.

    Raises:
        NotPrivateError: Somebody else can.
        OSError: It is not there, or cannot be made or opened.
    """
    if not _HAS_OWNERS:
        if create:
            path.mkdir(parents=True, exist_ok=True)
        yield PrivateFolder(path, None)
        return
    descriptor = _walk(path.absolute(), create)
    try:
        yield PrivateFolder(path, descriptor)
    finally:
        os.close(descriptor)


def _walk(path: Path, create: bool) -> int:
    """Returns a descriptor of a folder, all of whose parents are checked."""
    here, at = os.open("/", _FOLDER), Path("/")
    names = [*reversed(path.parts[1:])]
    links = 0
    try:
        while names:
            _check(here, at, is_last=False)
            name = names.pop()
            try:
                following = os.open(name, _FOLDER, dir_fd=here)
            except FileNotFoundError:
                if not create:
                    raise
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=here)
                names.append(name)
                continue
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENOTDIR) or links >= _MOST_LINKS:
                    raise
                target, links = _link(here, name, at / name), links + 1
                names += reversed(Path(target).parts)
                if not target.startswith("/"):
                    continue
                name, following = names.pop(), os.open("/", _FOLDER)
            os.close(here)
            here, at = following, at / name
        _check(here, at, is_last=True)
    except BaseException:
        os.close(here)
        raise
    return here


def _link(folder: int, name: str, path: Path) -> str:
    """Returns the target of a link that nobody else can replace."""
    info = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISLNK(info.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fspath(path))
    if info.st_uid not in (os.geteuid(), 0):
        raise NotPrivateError(f"the link {path} belongs to another user")
    return os.readlink(name, dir_fd=folder)


def _check(folder: int, path: Path, is_last: bool) -> None:
    """Raises `NotPrivateError` if somebody else can replace what is in a folder."""
    info, user = os.fstat(folder), os.geteuid()
    if info.st_uid != user and (is_last or info.st_uid != 0):
        raise NotPrivateError(
            f"{path} belongs to another user (set DYNAMO_BACKENDS_CACHE to a folder of yours)"
        )
    others, is_sticky = info.st_mode & _OTHERS, info.st_mode & stat.S_ISVTX
    if others and not is_last:
        is_own = others == stat.S_IWGRP and _is_own_group(info.st_gid)
        others = 0 if is_sticky or is_own else others
    if others:
        raise NotPrivateError(
            f"others can write to {path}; run: chmod go-w {path} "
            "(or set DYNAMO_BACKENDS_CACHE to a folder of yours)"
        )


@functools.cache
def _is_own_group(group: int) -> bool:
    """Returns whether a group has no other member: many systems give each user a group."""
    import grp
    import pwd

    try:
        entry, user = grp.getgrgid(group), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    is_namesake = entry.gr_name == user.pw_name and user.pw_gid == group
    return is_namesake and not {*entry.gr_mem} - {user.pw_name}


def require_regular_file(handle: int, path: Path) -> None:
    """Raises `OSError` if a descriptor is not a regular file's."""
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))


def open_file(path: Path) -> int:
    """Opens a regular file for reading; never blocks on a named pipe.

    Raises:
        OSError: It is not there, or no file.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(path, flags)
    try:
        require_regular_file(handle, path)
    except BaseException:
        os.close(handle)
        raise
    return handle


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_LOCK = "lock"
_ABANDONED_S = 24 * 3600.0
"""Seconds after which folders that are not locked, or on systems without locks, are removed."""


@contextlib.contextmanager
def temporary_process_folder(root: Path) -> Iterator[Path]:
    """Creates a folder that is removed at the end (context manager).

    Raises:
        OSError: It cannot be made, or others could write to it.
    """
    with open_private_folder(root.parent, create=True):
        pass
    guard = root.with_name(f"{root.name}.lock")
    with _locked(guard), open_private_folder(root, create=True):
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

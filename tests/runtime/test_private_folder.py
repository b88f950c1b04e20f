"""Folders that nobody else can write to, and files in them."""

import logging
import os
import stat
import threading
import types
from pathlib import Path

import pytest

from dynamo_backends.interface.errors import PackageError
from dynamo_backends.package.archive import Archive
from dynamo_backends.runtime import private_folder
from dynamo_backends.runtime.cache import DiskCache, _warn_once, vendor_folder
from dynamo_backends.runtime.private_folder import NotPrivateError, open_private_folder

pytestmark = pytest.mark.skipif(os.name != "posix", reason="owners and modes of POSIX")
as_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
STRANGER = 12345


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """The last of three folders, each in the one before."""
    _warn_once.cache_clear()
    (made := tmp_path / "a" / "b" / "c").mkdir(parents=True)
    return made


def is_used(folder: Path) -> bool:
    """Whether entries are written to a folder and read; it is one answer."""
    cache = DiskCache(folder)
    written = cache.put("key", {"part": b"1"})
    assert (cache.get("key") is not None) is written
    return written


@pytest.mark.parametrize("up", [0, 1, 2], ids=["the folder", "its parent", "above it"])
@pytest.mark.parametrize("mode", [0o777, 0o707, 0o775], ids=oct)
def test_no_folder_on_the_way_is_writable_by_others(
    up: int, mode: int, folders: Path, caplog: pytest.LogCaptureFixture
):
    place = [folders, *folders.parents][up]
    assert is_used(folders)
    gid = STRANGER if os.geteuid() == 0 else -1
    os.chown(place, -1, gid)
    place.chmod(mode)
    if os.stat(place).st_gid == os.getgid() and mode == 0o775:
        pytest.skip("needs a group of others")
    assert not is_used(folders)
    assert f"others can write to {place}; run: chmod go-w {place}" in caplog.text
    place.chmod(0o755)
    assert is_used(folders)


@as_root
@pytest.mark.parametrize("up", [0, 1, 2], ids=["the folder", "its parent", "above it"])
def test_no_folder_on_the_way_belongs_to_another_user(
    up: int, folders: Path, caplog: pytest.LogCaptureFixture
):
    place = [folders, *folders.parents][up]
    os.chown(place, STRANGER, -1)
    assert not is_used(folders)
    assert f"{place} belongs to another user" in caplog.text
    with (
        pytest.raises(NotPrivateError, match="belongs to another user"),
        open_private_folder(folders),
    ):
        pass


@as_root
def test_an_entry_of_a_stranger_is_not_read(folders: Path):
    """All that could be planted: by a folder that is renamed, a link, and by the folder's mode."""
    assert is_used(folders)
    theirs = folders.parent / "theirs"
    theirs.mkdir()
    os.chown(theirs, STRANGER, -1)
    os.rename(folders, folders.with_name("mine"))
    os.rename(theirs, folders)
    assert DiskCache(folders).get("key") is None
    folders.rmdir()
    sticky = folders.parent / "sticky"
    sticky.mkdir()
    sticky.chmod(0o1777)
    (sticky / "link").symlink_to(folders.with_name("mine"))
    assert DiskCache(sticky / "link").get("key") is not None
    os.chown(sticky / "link", STRANGER, -1, follow_symlinks=False)
    assert DiskCache(sticky / "link").get("key") is None


def test_a_sticky_parent_and_links_of_ours_are_fine(tmp_path: Path):
    tmp_path.chmod(0o1777)
    assert is_used(tmp_path / "x" / "y")
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o700
    (tmp_path / "link").symlink_to("x/y/../y")
    (tmp_path / "absolute").symlink_to(tmp_path / "x")
    assert DiskCache(tmp_path / "link").get("key") == {"part": b"1"}
    assert DiskCache(tmp_path / "absolute" / "y").get("key") == {"part": b"1"}
    (tmp_path / "loop").symlink_to("loop")
    assert not is_used(tmp_path / "loop" / "z")


def test_the_folder_itself_may_not_be_sticky(folders: Path):
    """In /tmp itself anybody can put an entry in the place of one that is not there yet."""
    folders.chmod(0o1777)
    assert not is_used(folders)


@as_root
def test_a_folder_of_root_is_on_the_way_alone(folders: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    with (
        pytest.raises(NotPrivateError, match="belongs to another user"),
        open_private_folder(folders),
    ):
        pass
    os.chown(folders, STRANGER, -1)
    with open_private_folder(folders):
        pass


@pytest.mark.parametrize("others", [[], ["somebody"]])
def test_a_group_with_members_is_not_of_one_user(
    others: list[str], folders: Path, monkeypatch: pytest.MonkeyPatch
):
    """Many systems give each user a group of the same name, to which others may be added."""
    import grp
    import pwd

    user, group = pwd.getpwuid(os.geteuid()), folders.parent.stat().st_gid
    entry = types.SimpleNamespace(gr_name=user.pw_name, gr_mem=[user.pw_name, *others])
    monkeypatch.setattr(grp, "getgrgid", lambda gid: entry)
    owner = types.SimpleNamespace(pw_name=user.pw_name, pw_gid=group)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: owner)
    private_folder._is_own_group.cache_clear()
    folders.parent.chmod(0o775)
    try:
        assert is_used(folders) is not bool(others)
    finally:
        private_folder._is_own_group.cache_clear()


def test_files_are_readable_by_their_owner_alone(folders: Path):
    assert is_used(folders)
    assert [stat.S_IMODE(path.stat().st_mode) for path in folders.iterdir()] == [0o600]


def test_parents_need_not_be_readable(tmp_path: Path):
    (tmp_path / "closed" / "cache").mkdir(parents=True)
    (tmp_path / "closed").chmod(0o311)
    assert is_used(tmp_path / "closed" / "cache")


def test_what_is_no_file_is_no_entry(folders: Path):
    """Reading a pipe without a writer would wait for ever; a link may lead anywhere."""
    cache = DiskCache(folders)
    assert cache.put("real", {"part": b"1"})
    os.mkfifo(folders / "pipe.bin")
    (folders / "link.bin").symlink_to(folders / "real.bin")
    (folders / "folder.bin").mkdir()
    (folders / "device.bin").symlink_to("/dev/null")
    for key in ("pipe", "link", "folder", "device"):
        assert cache.get(key) is None
        assert cache.read_file(f"{key}.bin") is None
    assert cache.size() == (folders / "real.bin").stat().st_size
    assert cache.list_files(".bin") == ["real.bin"]
    assert cache.put("pipe", {"part": b"2"})  # takes its place
    assert cache.get("pipe") == {"part": b"2"}


@as_root
def test_a_device_is_no_entry(folders: Path):
    try:
        os.mknod(folders / "null.bin", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("the system admits no devices")
    assert DiskCache(folders).get("null") is None
    assert DiskCache(folders).read_file("null.bin") is None


def test_a_package_that_is_a_pipe_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "model.dbp")
    with pytest.raises(PackageError, match="it is no regular file"):
        Archive(tmp_path / "model.dbp")


def test_a_vendors_folder_is_private_or_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    _warn_once.cache_clear()
    monkeypatch.setenv("DYNAMO_BACKENDS_CACHE", str(tmp_path))
    assert vendor_folder("engines") == tmp_path / "engines"
    (tmp_path / "engines").chmod(0o777)
    assert vendor_folder("engines") is None
    assert "is not used: others can write to" in caplog.text


def test_a_folder_that_is_exchanged_all_the_time_gives_no_foreign_bytes(tmp_path: Path):
    """A thread plays the other user, who renames a folder in a place that others can write to."""
    caches = {name: tmp_path / "place" / name for name in ("mine", "theirs")}
    for name, folder in caches.items():
        assert DiskCache(folder / "cache").put("key", {"whose": name.encode()})
    (caches["theirs"]).chmod(0o777)
    current, spare = tmp_path / "place" / "current", tmp_path / "place" / "spare"
    os.rename(caches["mine"], current)
    os.rename(caches["theirs"], spare)
    over, logger = threading.Event(), logging.getLogger("dynamo_backends")

    def exchange() -> None:
        aside = current.with_name("aside")
        while not over.is_set():
            os.rename(current, aside)
            os.rename(spare, current)
            os.rename(aside, spare)

    thread = threading.Thread(target=exchange)
    thread.start()
    logger.disabled = True
    try:
        read = [DiskCache(current / "cache").get("key") for _ in range(3000)]
    finally:
        over.set()
        thread.join()
        logger.disabled = False
    whose = {None if parts is None else parts["whose"] for parts in read}
    assert whose <= {None, b"mine"}
    assert b"mine" in whose

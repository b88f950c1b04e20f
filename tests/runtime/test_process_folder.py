"""Folders of processes, by locks rather than by process ids, which containers do not share."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dynamo_backends.runtime import private_folder as module
from dynamo_backends.runtime.private_folder import temporary_process_folder

OTHER = """
import os, sys, time
from pathlib import Path
from dynamo_backends.runtime.private_folder import temporary_process_folder
with temporary_process_folder(Path(sys.argv[1])) as folder:
    (folder / "graph").write_text("theirs")
    print(folder, flush=True)
    sys.stdin.read()
    if sys.argv[2:] == ["crash"]:
        os._exit(1)
"""


def start(root: Path, *arguments: str) -> tuple["subprocess.Popen[str]", Path]:
    """Another process with a folder: as one in another container, it is known by its lock alone."""
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(root), *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert other.stdout is not None
    return other, Path(other.stdout.readline().strip())


def end(other: "subprocess.Popen[str]") -> None:
    other.communicate(timeout=60)


@pytest.mark.skipif(module.fcntl is None, reason="no locks of POSIX")
def test_folders_of_living_processes_stay_and_of_others_go(tmp_path: Path):
    root = tmp_path / "cache" / "tuning"
    other, theirs = start(root, "crash")
    with temporary_process_folder(root) as ours:
        assert ours.is_dir()
        assert (theirs / "graph").read_text() == "theirs"
    assert not ours.exists()
    assert (theirs / "graph").exists()
    end(other)
    assert theirs.exists(), "it crashed"
    with temporary_process_folder(root) as ours:
        assert not theirs.exists()
    assert not root.exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_does_not_keep_a_folder(tmp_path: Path):
    with module._locked(tmp_path / "lock"):
        assert not module._is_abandoned(tmp_path)
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    try:
        assert module._is_abandoned(tmp_path)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


@pytest.mark.parametrize("has_locks", [True, False])
def test_without_a_lock_old_folders_go(
    has_locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if not has_locks:
        monkeypatch.setattr(module, "fcntl", None)
    names = ("12345-of-an-older-version", "young")
    for name in names:
        (tmp_path / "tuning" / name).mkdir(parents=True)
    os.utime(tmp_path / "tuning" / names[0], (1, 1))
    with temporary_process_folder(tmp_path / "tuning"):
        left = {p.name for p in (tmp_path / "tuning").iterdir()}
    assert left & {*names} == {"young"}

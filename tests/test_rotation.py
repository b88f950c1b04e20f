"""Every test and parameter runs within `rotation.COMMITS` commits."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import rotation


@dataclass(frozen=True)
class Item:
    """A test as `rotation.left_out` sees one."""

    nodeid: str
    long: bool = False

    def get_closest_marker(self, name: str) -> object | None:
        return self if name == "long" and self.long else None


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Sets the rotation."""

    def set_to(number: int) -> None:
        monkeypatch.setenv(rotation.VARIABLE, str(number))
        rotation.rotation.cache_clear()

    yield set_to
    monkeypatch.undo()
    rotation.rotation.cache_clear()


def test_each_item_runs_within_so_many_commits(at: Any):
    items: list[Any] = [Item(f"tests/a.py::long{i}", long=True) for i in range(50)]
    items += [Item("tests/a.py::short"), Item("tests/a.py::short[parameter]")]
    for name in rotation.SHARES:
        for count in (1, 3, 50):
            items += [Item(f"tests/{name}::test_{count}[{i}]") for i in range(count)]
    runs = dict.fromkeys(items, 0)
    for number in range(1000, 1000 + rotation.COMMITS):
        at(number)
        left_out = rotation.left_out(items)
        for item in set(items) - left_out:
            runs[item] += 1
    assert min(runs.values()) >= 1
    assert sum(runs.values()) < rotation.COMMITS * len(items) / 2
    assert runs[Item("tests/a.py::short[parameter]")] == rotation.COMMITS


def test_seeds_and_parts_are_others_each_time(at: Any):
    at(7)
    first = set(rotation.seeds(5)), set(rotation.part(100, 4))
    at(8)
    assert not first[0] & set(rotation.seeds(5))
    assert not first[1] & set(rotation.part(100, 4))


def test_files_with_shares_exist():
    here = Path(__file__).parent
    assert [name for name in rotation.SHARES if not (here / name).exists()] == []
    assert max(rotation.SHARES.values()) <= rotation.COMMITS


HANGS = """
import threading

def test_hangs():
    threading.Lock().acquire()
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
"""


def test_a_test_that_hangs_fails_with_its_stack(tmp_path: Path):
    file = tmp_path / "test_hanging.py"
    file.write_text(HANGS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=1"]
    command += ["--timeout-method=thread", "--rootdir", str(tmp_path), "-c", "/dev/null", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert ended.returncode != 0
    assert "lock.acquire()" in ended.stdout + ended.stderr

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


def test_each_item_runs_within_so_many_commits(at: Any, monkeypatch: pytest.MonkeyPatch):
    items: list[Any] = [Item(f"tests/a.py::marked{i}", long=True) for i in range(50)]
    items += [Item("tests/a.py::short"), Item("tests/a.py::short[parameter]")]
    seconds = {}
    for taken in (0.4, 2.0, 9.0, 1000.0):
        seconds[f"tests/b.py::alone_{taken}"] = taken
        items.append(Item(f"tests/b.py::alone_{taken}"))
        for count in (1, 3, 50):
            seconds[f"tests/b.py::test_{taken}_{count}"] = taken
            items += [Item(f"tests/b.py::test_{taken}_{count}[{i}]") for i in range(count)]
    monkeypatch.setattr(rotation, "recorded_seconds", lambda: seconds)
    runs = dict.fromkeys(items, 0)
    for number in range(1000, 1000 + rotation.COMMITS):
        at(number)
        left_out = rotation.left_out(items)
        taken = [seconds.get(item.nodeid.partition("[")[0], 0) for item in set(items) - left_out]
        assert sum(taken) < sum(seconds.get(i.nodeid.partition("[")[0], 0) for i in items) / 5
        for item in set(items) - left_out:
            runs[item] += 1
    assert min(runs.values()) >= 1
    assert sum(runs.values()) < rotation.COMMITS * len(items) / 2
    assert runs[Item("tests/a.py::short[parameter]")] == rotation.COMMITS
    assert runs[Item("tests/b.py::alone_0.4")] == rotation.COMMITS


def test_seeds_and_parts_are_others_each_time(at: Any):
    at(7)
    first = set(rotation.seeds(5)), set(rotation.part(100, 4))
    at(8)
    assert not first[0] & set(rotation.seeds(5))
    assert not first[1] & set(rotation.part(100, 4))


def test_seconds_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "seconds.json"
    file.write_text('{"tests/test_rotation.py": {"test_old": 3.5}, "tests/gone.py": {"test_x": 9}}')
    monkeypatch.setattr(rotation, "RECORD", file)
    here = "tests/test_rotation.py"
    rotation.record({f"{here}::test_new[1]": 1.0, f"{here}::test_new[2]": 2.0, f"{here}::fast": 0})
    assert rotation.recorded_seconds() == {f"{here}::test_old": 3.5, f"{here}::test_new": 1.5}


def test_files_with_seconds_exist():
    root = Path(__file__).parents[1]
    files = {name.partition("::")[0] for name in rotation.recorded_seconds()}
    assert [name for name in files if not (root / name).exists()] == []


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

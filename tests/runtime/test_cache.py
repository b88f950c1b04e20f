"""Executables on disk: found again, checked, limited, harmless when the folder is unusable."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dynamo_backends
from dynamo_backends.runtime.cache import _MAGIC, DiskCache, _warn_once, cache_folder, source_digest

COMPILE = """
import json, torch, dynamo_backends
torch.manual_seed(0)
m = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
                        torch.nn.Flatten(), torch.nn.Linear(8 * 36, 2)).eval()
x = torch.randn(2, 3, 8, 8)
with torch.no_grad(), dynamo_backends.record() as reports:
    c = torch.compile(m, backend="openxla")
    assert torch.allclose(c(x), m(x), atol=1e-5)
print(json.dumps([sum(r.executables for r in reports), sum(r.cache_hits for r in reports)]))
"""


def start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", COMPILE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out.splitlines()[-1], err


def test_another_process_finds_the_executable(capsys: pytest.CaptureFixture[str]):
    exec(COMPILE, {})
    assert capsys.readouterr().out.splitlines()[-1] == "[1, 0]"
    assert finish(start())[0] == "[1, 1]"


@pytest.mark.long
def test_two_processes_at_once():
    processes = [start(), start()]
    assert all(finish(p)[0].startswith("[1,") for p in processes)
    assert finish(start())[0] == "[1, 1]"
    assert not list(cache_folder().glob("*.tmp"))


@pytest.mark.parametrize("damage", ["truncate", "garbage", "flip", "empty", "other format"])
def test_a_damaged_entry_is_dropped_and_rebuilt(damage: str, caplog: pytest.LogCaptureFixture):
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    x = torch.randn(3, 4)

    def compile_once() -> int:
        torch._dynamo.reset()
        with torch.no_grad(), dynamo_backends.record() as reports:
            compiled = torch.compile(module, backend=dynamo_backends.compiler("openxla"))
            torch.testing.assert_close(compiled(x), module(x))
        return reports[0].cache_hits

    assert compile_once() == 0
    (entry,) = cache_folder().glob("*.bin")
    data = bytearray(entry.read_bytes())
    if damage == "truncate":
        data = data[: len(data) // 2]
    elif damage == "garbage":
        data = bytearray(os.urandom(1000))
    elif damage == "flip":
        data[-100] ^= 0xFF
    elif damage == "other format":
        data[: len(_MAGIC)] = _MAGIC.replace(b"1", b"2")
    else:
        data = bytearray()
    entry.write_bytes(data)
    assert compile_once() == 0
    assert "damaged cache entry" in caplog.text
    assert compile_once() == 1


def test_code_that_xla_refuses_is_dropped(caplog: pytest.LogCaptureFixture):
    module, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval(), torch.ones(1, 4)
    compiler = dynamo_backends.compiler("openxla")
    with torch.no_grad():
        torch.compile(module, backend=compiler)(x)
        (entry,) = cache_folder().glob("*.bin")
        cache = DiskCache(cache_folder())
        parts = cache.get(entry.stem)
        assert parts is not None
        cache.put(entry.stem, {**parts, "main": b"not machine code"})
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(module, backend=compiler)(x), module(x))
    assert "dropped an unusable cache entry" in caplog.text


def test_a_cache_folder_that_cannot_be_written_warns_and_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    _warn_once.cache_clear()
    blocked = tmp_path / "file"
    blocked.write_text("a file where the folder should be")
    monkeypatch.setenv("DYNAMO_BACKENDS_CACHE", str(blocked / "cache"))
    f = torch.compile(lambda x: x.sin() * 2 + 1, backend=dynamo_backends.compiler("openxla"))
    x = torch.randn(3)
    torch.testing.assert_close(f(x), x.sin() * 2 + 1)
    assert "compiled graphs are not saved to the disk cache" in caplog.text


def test_a_folder_that_others_can_write_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    _warn_once.cache_clear()
    tmp_path.chmod(0o777)
    cache = DiskCache(tmp_path)
    assert not cache.put("key", {"a": b"1"})
    assert cache.get("key") is None
    assert f"chmod go-w {tmp_path}" in caplog.text


def test_the_least_recently_used_entries_go_first(tmp_path: Path):
    cache = DiskCache(tmp_path / "c", limit=3500)
    for i in range(3):
        assert cache.put(str(i), {"part": bytes(1000)})
        os.utime(tmp_path / "c" / f"{i}.bin", (i, i))
    assert cache.get("0") == {"part": bytes(1000)}  # read: now the most recent
    cache.put("3", {"part": bytes(1000)})
    assert cache.get("1") is None
    assert cache.get("0") is not None
    assert cache.size() <= 3500


def test_options_that_matter_give_other_entries():
    x = torch.randn(3)
    for freezing in ("probe", "off"):
        compiler = dynamo_backends.compiler("openxla", freezing=freezing)
        torch.compile(lambda x: x.sin() * 2, backend=compiler)(x)
    assert len(list(cache_folder().glob("*.bin"))) == 2


def looks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Folders that are looked through from now on."""
    seen: list[Any] = []
    scan = os.scandir

    def watched(folder: Any) -> Any:
        seen.append(folder)
        return scan(folder)

    monkeypatch.setattr(os, "scandir", watched)
    return seen


def test_a_write_does_not_look_through_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = looks(monkeypatch)
    for i in range(100):
        assert DiskCache(tmp_path).put(str(i), {"part": bytes(1000)})
    assert len(seen) == 1


def test_the_limit_holds_after_each_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen, limit = looks(monkeypatch), 100_000
    for i in range(500):
        assert DiskCache(tmp_path, limit).put(str(i), {"part": bytes(1000)})
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= limit
    assert len(list(tmp_path.iterdir())) > 80, "no more than a sixteenth is dropped beyond it"
    assert len(seen) < 150


def test_what_other_processes_write_counts_before_long(tmp_path: Path):
    cache = DiskCache(tmp_path, limit=100_000)
    cache.put("first", {"part": bytes(1000)})
    foreign = tmp_path / "foreign.bin"
    foreign.write_bytes(bytes(200_000))
    os.utime(foreign, (1, 1))
    for i in range(7):
        assert foreign.exists() == (i < 6)
        cache.put(str(i), {"part": bytes(1000)})
    assert cache.size() <= 100_000
    assert cache.get("first") is not None


def test_files_that_do_not_count_are_left_out_of_a_digest(monkeypatch: pytest.MonkeyPatch):
    digest = source_digest.__wrapped__
    given = digest("ort"), digest("ort", without=("quantized.py",))
    assert given[0] != given[1]
    original = Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda p: b"" if p.name == "quantized.py" else original(p)
    )
    assert digest("ort") != given[0]
    assert digest("ort", without=("quantized.py",)) == given[1]

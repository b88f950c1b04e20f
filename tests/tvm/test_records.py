"""Records of tuning on disk: damaged, foreign, shared, or impossible to write."""

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dynamo_backends.runtime.cache import DiskCache
from dynamo_backends.tvm import records
from dynamo_backends.tvm.records import Record, Records

KEY = "ab" * 32
RECORD = Record([["GetSBlock"], []], "00ff", 7, 8, (1.5, 1.4, 1.6))


@pytest.fixture(autouse=True)
def _nothing_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_unwritten", {})


def test_what_is_put_is_found_in_the_same_environment_alone():
    kept = Records("cpu a, 1 thread")
    assert kept.empty
    before = kept.state()
    kept.put(KEY, RECORD)
    assert Records("cpu a, 1 thread").get(KEY) == RECORD
    assert Records("cpu a, 2 threads").get(KEY) is None
    assert not kept.empty
    tuned = kept.state()
    assert tuned != before
    kept.put(KEY, replace(RECORD, trace={"tile": [4, 16]}))
    assert kept.state() not in (before, tuned)
    assert Records("cpu a, 2 threads").state() == before


@pytest.mark.parametrize("length", [0, 20, 100])
def test_a_damaged_record_is_dropped_with_a_warning(length: int, caplog: pytest.LogCaptureFixture):
    kept = Records("x")
    kept.put(KEY, RECORD)
    (path,) = kept.folder.iterdir()
    path.write_bytes(path.read_bytes()[:length])
    assert kept.get(KEY) is None
    assert "dropped a damaged cache entry" in caplog.text
    assert not path.exists()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"[]", "it does not have the format 1"),
        (b'{"format": 1}', "'mark' is missing or wrong"),
        (RECORD.to_bytes().replace(b'"00ff"', b"3"), "'mark' is missing or wrong"),
        (RECORD.to_bytes().replace(b"1.5", b'"fast"'), "could not convert string to float"),
        (b"\xff", "can't decode"),
    ],
)
def test_what_is_no_record_is_dropped(data: bytes, why: str, caplog: pytest.LogCaptureFixture):
    kept = Records("x")
    assert DiskCache(kept.folder).put(KEY, {"record": data})
    assert kept.get(KEY) is None
    assert f"dropped an unusable record of tuning, {KEY[:12]}: " in caplog.text
    assert why in caplog.text
    assert list(kept.folder.iterdir()) == []


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("DYNAMO_BACKENDS_CACHE", str(tmp_path / "file"))
    kept = Records("x")
    before = kept.state()
    kept.put(KEY, RECORD)
    assert "records of tuning are not saved to the disk cache" in caplog.text
    assert kept.get(KEY) == RECORD
    assert kept.state() != before


def test_writers_and_readers_at_once_see_whole_records(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    several = [replace(RECORD, trials=n, trace=[["x" * 500 * n]]) for n in range(1, 9)]
    Records("x").put(KEY, RECORD)

    def work(record: Record) -> list[Record | None]:
        own, found = Records("x"), []
        for _ in range(25):
            own.put(KEY, record)
            found.append(own.get(KEY))
        return found

    with ThreadPoolExecutor(len(several)) as pool:
        found = [r for seen in pool.map(work, several) for r in seen]
    assert {r.trials for r in found if r is not None} <= {r.trials for r in several}
    assert all(r is not None and asdict(r) == asdict(several[r.trials - 1]) for r in found)
    assert caplog.text == ""

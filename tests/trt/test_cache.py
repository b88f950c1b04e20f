"""Engines and times of kernels on disk."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dynamo_backends.runtime.cache import DiskCache, cache_folder
from dynamo_backends.trt import store
from tests.trt.conftest import Machine
from tests.trt.helpers import compiled, net


def entries(kind: str = "tensorrt") -> list[Path]:
    return sorted(cache_folder().glob(f"{kind}-*.bin"))


def again(**options: Any) -> Any:
    """Compiles a net anew, with nothing in memory; its result is checked."""
    torch._dynamo.reset()
    store.PROGRAMS.clear()
    model, x = net(), torch.randn(4, 6)
    run, report = compiled(model, x, **options)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
    assert report.runtime_fallbacks == []
    return report


@pytest.mark.long
def test_a_second_process_builds_nothing(double: Machine):
    """Whatever its weights are, since a plan holds none."""
    again()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.trt.process", "11", "double 8.0"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=root)
    assert done.returncode == 0, done.stderr
    second = json.loads(done.stdout)
    assert second.pop("wrong") < 1e-6
    assert second == {"builds": 0, "loads": 1, "refits": 1, "cache_hits": 1}


def test_engines_of_other_weights_versions_gpus_and_options(double: Machine):
    assert again().cache_hits == 0
    assert again().cache_hits == 1  # with other weights
    assert double.host is not None
    double.host.name = "double 9.0"
    assert again().cache_hits == 0
    assert again(optimization_level=5).cache_hits == 0
    assert again(precision="tf32").cache_hits == 0
    assert again(optimization_level=5, freezing="strict").cache_hits == 1
    assert len(entries()) == len(double.log.builds) == 4
    assert again(cache=False).cache_hits == 0
    assert len(double.log.builds) == 5


@pytest.mark.parametrize("damage", ["truncated", "engine of another GPU", "not an engine"])
def test_a_damaged_or_foreign_engine_is_dropped_and_rebuilt(
    double: Machine, damage: str, caplog: pytest.LogCaptureFixture
):
    again()
    (path,) = entries()
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    else:
        disk = DiskCache(cache_folder())
        parts = disk.get(path.stem)
        assert parts is not None
        engine = parts["engine"].replace(b'"device": "double 8.0"', b'"device": "other"')
        parts = {**parts, "engine": engine if "GPU" in damage else b"nothing"}
        disk.put(path.stem, parts)
    with caplog.at_level(logging.WARNING, "dynamo_backends"):
        assert again().cache_hits == 0
    assert len(double.log.builds) == 2
    dropped = [r.message for r in caplog.records if "dropped" in r.message]
    assert len(dropped) == 1
    assert "cache entry" in dropped[0] or "TensorRT engine" in dropped[0]
    assert again().cache_hits == 1


def test_facts_that_are_none(double: Machine):
    again()
    (path,) = entries()
    disk = DiskCache(cache_folder())
    parts = disk.get(path.stem)
    assert parts is not None
    for facts in (b"{}", b"[1", b'{"inputs": 3, "outputs": [], "profile": {}}'):
        disk.put(path.stem, {**parts, "facts": facts})
        assert again().cache_hits == 0
    assert len(double.log.builds) == 4
    assert store.decode(parts).engine == parts["engine"]


def test_engines_are_limited_in_bytes_the_oldest_go_first(
    double: Machine, monkeypatch: pytest.MonkeyPatch
):
    again()
    (first,) = entries()
    os.utime(first, (1, 1))
    limit = int(1.5 * first.stat().st_size)
    others = DiskCache.__init__.__defaults__[1:]
    monkeypatch.setattr(DiskCache.__init__, "__defaults__", (limit, *others))
    again(optimization_level=4)
    assert first not in entries()
    assert len(entries()) == 1


def test_measured_times_are_kept(double: Machine):
    again()
    (path,) = entries("timing")
    (engine,) = entries()
    engine.unlink()
    again()
    assert double.log.timing_hits == 1
    path.write_bytes(b"nothing")
    again(workspace=1 << 20)
    again(workspace=1 << 21, timing_cache=False)
    assert double.log.timing_hits == 1
    assert double.log.builds[-1]["workspace"] == 1 << 21


def test_times_of_another_version_are_dropped(double: Machine):
    again()
    (path,) = entries("timing")
    disk = DiskCache(cache_folder())
    parts = disk.get(path.stem)
    assert parts is not None
    disk.put(path.stem, {"times": parts["times"].replace(b"11.4.0.106", b"11.0.0.000")})
    again(optimization_level=2)
    assert len(double.log.builds) == 2
    kept = disk.get(path.stem)
    assert kept is not None
    assert b"11.4.0.106" in kept["times"]


def test_an_engine_in_use_serves_another_capture(double: Machine):
    x = torch.randn(4, 6)
    with torch.no_grad():
        kept = [compiled(net(), x)]
        torch._dynamo.reset()
        model = net()
        kept.append(compiled(model, x))
        torch.testing.assert_close(kept[1][0](x), model(x))
    assert len(double.log.builds) == 1
    assert kept[1][1].cache_hits == 0

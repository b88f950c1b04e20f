"""Plants a package with backends for torch.compile into the environment."""

import importlib
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from dynamo_backends.autotune import cost_model, status, tuning_thread, warm_start
from dynamo_backends.pipeline import background
from dynamo_backends.runtime.cache import cache_folder
from dynamo_backends.workers.progress import COUNTS, Counts
from dynamo_backends.workers.race import Race, Run
from tests.autotune import planted

LONG_S = 100
"""No test waits longer for a tuner."""

METADATA = "Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n"


@pytest.fixture(autouse=True)
def _nothing_won_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it matter which test is the first to compile with a backend."""
    warm_start._ranked.clear()
    monkeypatch.setattr(cost_model, "START_UP", {})


@pytest.fixture(scope="session")
def planted_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(planted.__file__, folder / "planted_backends.py")
    info = folder / "planted-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    points = "".join(f"{n} = planted_backends:{n}\n" for n in planted.ENTRY_POINTS)
    (info / "entry_points.txt").write_text(f"[torch_dynamo_backends]\n{points}")
    return folder


@pytest.fixture
def plant(planted_folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The package, as installed."""
    monkeypatch.syspath_prepend(str(planted_folder))
    module = importlib.import_module("planted_backends")
    monkeypatch.setitem(module.state, "broken", False)
    return module


@pytest.fixture(autouse=True)
def counts() -> Counts:
    """Counts of this test alone."""
    for name, value in vars(Counts()).items():
        setattr(COUNTS, name, value)
    return COUNTS


@pytest.fixture
def eager_seems_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any right candidate is chosen: eager seems a hundred times slower than it is."""
    original = Race._sample

    def biased(self: Race, run: Run, repeat: int) -> float:
        seconds = original(self, run, repeat)
        return seconds * 100 if run is self._runs.get("eager") else seconds

    monkeypatch.setattr(Race, "_sample", biased)


@pytest.fixture
def tuning(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuning_thread.TuningThread]:
    """A tuner of this test alone, and its graphs: jax keeps code, and with it what it calls."""
    monkeypatch.setattr(status, "_followed", weakref.WeakValueDictionary())
    made = tuning_thread.TuningThread()
    monkeypatch.setattr(tuning_thread, "_thread", made)
    yield made
    made.stop()
    assert background.wait_until_idle(LONG_S)
    assert not (cache_folder() / "tuning").exists(), "copies of the graph are left"

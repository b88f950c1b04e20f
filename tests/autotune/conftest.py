"""Plants a package with backends for torch.compile into the environment."""

import importlib
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from dynamo_backends.tuning.counts import COUNTS, Counts
from dynamo_backends.tuning.race import Race, Run
from tests.autotune import planted

METADATA = "Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n"


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

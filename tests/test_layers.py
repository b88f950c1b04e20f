"""Imports go downwards only, and the check that says so can fail."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """What `make lint` asks of the layers, on the package in a folder."""
    command = "from importlinter.cli import lint_imports_command as lint; lint()"
    return subprocess.run(
        [sys.executable, "-c", command, "--no-cache", "--no-logo"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A folder with a copy of the package and its contracts."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "dynamo_backends", tmp_path / "dynamo_backends", ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_layers_hold():
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("module", "line", "said"),
    [
        (
            "graph/graph.py",
            "import dynamo_backends.pipeline.program_builder",
            "graph is not allowed",
        ),
        ("runtime/cache.py", "from dynamo_backends.aot import inputs", "runtime is not allowed"),
        ("tvm/exclusions.py", "import dynamo_backends.iree.exclusions", "tvm is not allowed"),
        (
            "graph/graph.py",
            "import dynamo_backends.graph.planned_decomposition",
            "No cycles are allowed",
        ),
    ],
)
def test_a_planted_import_is_found(copied: Path, module: str, line: str, said: str):
    path = copied / "dynamo_backends" / module
    path.write_text(path.read_text(encoding="utf-8") + f"\n{line}\n", encoding="utf-8")
    result = lint(copied)
    assert result.returncode != 0
    assert said in " ".join(result.stdout.split())

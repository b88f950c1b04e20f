"""tools/matrix.py: combinations, pytest's reports, and the page of what passed."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.bench.programs import ROOT, load

matrix = load("tools/matrix.py")

REPORT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="3" tests="10" time="1.0">
</testsuite></testsuites>"""


def row(python: str, torch: str, **more: Any) -> Any:
    values = {"jax": "", "date": "2026-01-02", "tests": "all", "passed": 3, **more}
    return matrix.Row(python, torch, **values)


def test_every_combination_has_an_environment_of_its_own():
    cells = matrix.cells(["3.11", "3.12"], ["2.11.0", "2.15.0"], ["", "0.10.0"])
    assert len({cell.folder for cell in cells}) == 8
    assert cells[1].folder == ".venv-py3.11-torch2.11.0-jax0.10.0"
    assert cells[-2].folder == ".venv-py3.12-torch2.15.0"


def test_errors_count_as_failures():
    assert matrix.counts(REPORT) == (4, 3, 3)


def test_a_new_row_replaces_that_of_its_combination_and_versions_are_sorted_as_numbers():
    old = [row("3.11", "2.15.0"), row("3.11", "2.9.1"), row("3.9", "2.15.0")]
    merged = matrix.replaced(old, [row("3.11", "2.15.0", failed=1)])
    assert [(r.python, r.torch, r.failed) for r in merged] == [
        ("3.9", "2.15.0", 0),
        ("3.11", "2.9.1", 0),
        ("3.11", "2.15.0", 1),
    ]


def test_the_page_says_what_failed_and_what_could_not_be_run():
    rows = [
        row("3.11", "2.15.0", failed=2, skipped=1),
        row("3.12", "2.15.0", jax="0.10.0", reason="could not be installed"),
    ]
    assert matrix.page(rows).splitlines()[-2:] == [
        "| 3.11 | 2.15.0 | as pinned | all | **2 failed**, 3 passed, 1 skipped | 2026-01-02 |",
        "| 3.12 | 2.15.0 | 0.10.0 | all | could not be installed | 2026-01-02 |",
    ]


def test_the_page_says_what_the_environments_lacked():
    listed = {
        "backends": [
            {"name": "openxla", "usable": True, "detail": "jaxlib 0.10.2"},
            {"name": "tensorrt", "usable": False, "detail": "tensorrt is not installed"},
            {"name": "nnc", "usable": False, "detail": "torch 2.14.1+cpu was built without LLVM"},
        ]
    }
    lacks = matrix.lacking(listed)
    assert set(lacks) == {"tensorrt", "nnc"}
    rows = [
        row("3.11", "2.14.1", lacks=lacks),
        row("3.11", "2.15.0", lacks={"tensorrt": lacks["tensorrt"]}),
        row("3.12", "2.15.0", reason="could not be installed"),
    ]
    text = matrix.page(rows)
    assert text.count("## What the environments lacked") == 1
    assert text.splitlines()[-2:] == [
        "| `nnc` | torch was built without LLVM | 3.11 with 2.14.1 |",
        "| `tensorrt` | tensorrt is not installed | all |",
    ]


def test_what_pip_says_is_the_reason():
    said = "make: entering\nERROR: No matching distribution found for torch==2.99.0\nmake: *** [x]"
    assert matrix.why_not_installed(said).endswith(
        "No matching distribution found for torch==2.99.0"
    )
    assert matrix.why_not_installed("make: *** [x]") == "could not be installed"


def test_the_page_is_that_of_its_data():
    assert matrix.PAGE.read_text(encoding="utf-8") == matrix.page(matrix.read(matrix.DATA))


def test_its_share_of_the_tests_is_there():
    assert [path for path in matrix.TESTS if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("result", [(5, 0, 1), None])
def test_a_run_writes_rows_and_page(
    result: tuple[int, int, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(matrix, "DATA", tmp_path / "versions.json")
    monkeypatch.setattr(matrix, "PAGE", tmp_path / "versions.md")
    monkeypatch.setattr(matrix, "_version", {"python3.12": "3.12"}.get)
    tried: list[Any] = []

    def pretend(cell: Any, interpreter: str, tests: Any, name: str, workers: int) -> Any:
        tried.append((cell.python, cell.torch, interpreter, tests, name, workers))
        made = (cell.python, cell.torch, cell.jax, "2026-01-02", name)
        return matrix.Row(*made, *result) if result else matrix.Row(*made, reason="no")

    monkeypatch.setattr(matrix, "_tested", pretend)
    asked = ["--python", "python3.12", "--python", "python3.99", "--torch", "2.15.0", "tests"]
    asked += ["--workers", "1"]
    assert matrix.main(asked) == (result is None)
    assert tried == [("3.12", "2.15.0", "python3.12", ["tests"], "all", 1)]
    (written,) = matrix.read(matrix.DATA)
    assert json.loads(matrix.DATA.read_text()) == [asdict(written)]
    assert "| 3.12 | 2.15.0 |" in matrix.PAGE.read_text()

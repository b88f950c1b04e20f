"""The notebooks of examples/ run, and their pages show them."""

from pathlib import Path

import nbformat
import pytest

from tests.bench.programs import ROOT
from tools.notebooks import PAGES, kept, page, run


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_its_notebook(name: str):
    notebook = nbformat.read(ROOT / "examples" / name, as_version=4)
    text = (ROOT / "docs" / PAGES[name]).read_text(encoding="utf-8")
    assert text == page(notebook, name), "python tools/notebooks.py --pages"


def test_every_notebook_has_a_page():
    assert {path.name for path in (ROOT / "examples").glob("*.ipynb")} == {*PAGES}


@pytest.mark.parametrize("name", PAGES)
def test_a_notebook_runs_and_warns_of_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTHONWARNINGS", "default")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    stored = nbformat.read(ROOT / "examples" / name, as_version=4)
    ran = run(ROOT / "examples" / name)
    said = [o.text for c in ran.cells for o in c.get("outputs", ()) if o.output_type == "stream"]
    assert any("compiling ov (" in text for text in said), "autotune shows a line"
    assert not [text for text in said if "warn" in text.lower() or "fork" in text.lower()]
    for cell, before in zip(kept(ran).cells, stored.cells, strict=True):
        kinds = [[*o.data] for o in cell.get("outputs", ())]
        assert kinds == [[*o.data] for o in before.get("outputs", ())]

"""Runs the notebooks of examples/ and writes each as a page of the documentation.

python tools/notebooks.py          runs them, and writes them and their pages
python tools/notebooks.py --pages  writes the pages alone
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import nbformat

ROOT = Path(__file__).parents[1]
PAGES = {"first_look.ipynb": "notebook.md"}
"""Notebooks, and the pages in docs/ that show them."""


def run(path: Path) -> Any:
    """Returns a notebook with the outputs of a run in an empty folder.

    Raises:
        CellExecutionError: A cell raised.
    """
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=600, resources=resources).execute()
    return notebook


def kept(notebook: Any) -> Any:
    """Returns a notebook with what its page shows of the outputs: tables, or text."""
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type != "code":
            continue
        cell.outputs = [output for output in cell.outputs if output.get("data")]
        for output in cell.outputs:
            shown = "text/html" if "text/html" in output.data else "text/plain"
            lines = output.data[shown].splitlines()
            output.data = {shown: "\n".join(line.rstrip() for line in lines)}
    return notebook


def page(notebook: Any, name: str) -> str:
    """Returns a notebook as Markdown: text, code, and what it has shown."""
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        parts += filter(None, map(_shown, cell.outputs))
    parts.append(f"This page is `examples/{name}`, as it ran; `tools/notebooks.py` writes it.")
    return "\n\n".join(parts) + "\n"


def _shown(output: Any) -> str:
    data = output.get("data", {})
    if "text/html" in data:
        return f"<div>{data['text/html']}</div>"
    return f"```text\n{data['text/plain']}\n```" if "text/plain" in data else ""


def main() -> None:
    """Writes pages, and notebooks unless only pages are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", action="store_true", help="run nothing")
    only_pages = parser.parse_args().pages
    for name, target in PAGES.items():
        path = ROOT / "examples" / name
        notebook = nbformat.read(path, as_version=4) if only_pages else run(path)
        if not only_pages:
            nbformat.write(kept(notebook), path)
        (ROOT / "docs" / target).write_text(page(notebook, name), encoding="utf-8")


if __name__ == "__main__":
    main()

"""The site: its code runs, its options exist, and every public name is in the reference.

docs/backends.md, docs/capture.md and docs/explain.md have tests of their own.
"""

import ast
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dynamo_backends
from dynamo_backends.interface.compiler import Compiler
from dynamo_backends.interface.registry import get_backend, is_backend
from tests.bench.programs import ROOT
from tests.pages import NOT_RUN, differences, examples, executed

PACKAGE = ROOT / "dynamo_backends"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WITH_CODE = [str(p.relative_to(ROOT)) for p in PAGES if "```python" in p.read_text("utf-8")]
TESTED_ELSEWHERE = {"docs/backends.md", "docs/capture.md", "docs/explain.md", "docs/notebook.md"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long) if name == "docs/int8.md" else name
        for name in WITH_CODE
        if name not in TESTED_ELSEWHERE
    ],
)
def test_the_code_of_a_page_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)  # pages save files
    with executed(name) as (ran, _):
        assert [found for found in differences(ran) if found[0] is not None] == []


@pytest.mark.parametrize("name", ["README.md", "docs/start.md"])
def test_the_code_of_a_first_page_runs_when_it_is_pasted_into_one_file(name: str, tmp_path: Path):
    blocks = examples((ROOT / name).read_text(encoding="utf-8"))
    (tmp_path / "pasted.py").write_text("\n".join(block.code for block in blocks))
    done = subprocess.run(
        [sys.executable, "pasted.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", WITH_CODE)
def test_its_options_exist_and_what_is_not_run_has_a_reason(name: str):
    text = (ROOT / name).read_text(encoding="utf-8")
    blocks = list(examples(text))
    assert len(blocks) == text.count("```py"), "a block that is not run as the others are"
    assert {block.not_run for block in blocks} <= NOT_RUN | {""}
    for block in blocks:
        for backend, options in block.compilations():
            if is_backend(backend) and "guard_filter_fn" not in options:
                get_backend(backend).Options.parse(options, backend)


def public_objects() -> Iterator[tuple[str, Any]]:
    """Every name in an `__all__` of the package and its folders."""
    folders = [f"dynamo_backends.{m.name}" for m in pkgutil.iter_modules(dynamo_backends.__path__)]
    for module in map(importlib.import_module, ["dynamo_backends", *folders]):
        if hasattr(module, "__path__"):
            for name in getattr(module, "__all__", ()):
                yield f"{module.__name__}.{name}", getattr(module, name)


def test_the_reference_has_every_public_name_and_no_other():
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    documented = {}
    for path in re.findall(r"^::: (\S+)$", page, re.MULTILINE):
        module, _, name = path.rpartition(".")
        documented[id(getattr(importlib.import_module(module), name))] = path
    public = dict(public_objects())
    compilers = {name for name, value in public.items() if isinstance(value, Compiler)}
    assert set(re.findall(r"^\| `(dynamo_backends\.\S+)` \|", page, re.MULTILINE)) == compilers
    others = {id(value): name for name, value in public.items() if name not in compilers}
    assert {name for key, name in others.items() if key not in documented} == set()
    assert {path for key, path in documented.items() if key not in others} == set()


def anchors(text: str) -> set[str]:
    """Of a page's headings, as the site and code hosts make them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    plain = (re.sub(r"[^\w\s-]", "", title).strip().lower() for title in titles)
    return {re.sub(r"[-\s]+", "-", title) for title in plain}


def test_links_lead_somewhere_and_every_page_is_in_the_navigation():
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)\s]+)\)", page.read_text(encoding="utf-8")):
            name, _, anchor = target.partition("#")
            path = page.parent / name if name else page
            if not path.is_file() or anchor not in {"", *anchors(path.read_text("utf-8"))}:
                broken.append(f"{page.relative_to(ROOT)}: {target}")
            elif page.name != "README.md" and not path.resolve().is_relative_to(ROOT / "docs"):
                broken.append(f"{page.relative_to(ROOT)}: {target} is not on the site")
    assert broken == []
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    on_site = {str(p.relative_to(ROOT / "docs")) for p in PAGES[1:]}
    records = {name for name in on_site if name.startswith("decisions/")} - {"decisions/index.md"}
    assert set(re.findall(r"([\w./-]+\.md)$", nav, re.MULTILINE)) == on_site - records


def test_the_pages_to_read_are_few_and_each_is_for_one_sitting():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    to_read = re.findall(r"([\w-]+\.md)$", nav.partition("- Reference:")[0], re.MULTILINE)
    assert 15 < len(to_read) <= 26, "with the first page; what one looks up is in Reference"
    for name in to_read:
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        written = re.sub(r"<!-- (results|measured): .*?<!-- until here -->", "", text, flags=re.S)
        assert len(written.split()) <= 1600, name


def test_the_index_of_decisions_has_each_record_once_with_its_title():
    folder = ROOT / "docs" / "decisions"
    index = (folder / "index.md").read_text("utf-8")
    listed = re.findall(r"^\| \[(.+?)\]\((\S+)\) \| .+\? \|$", index, re.M)
    assert sorted(name for _, name in listed) == sorted(
        path.name for path in folder.glob("*.md") if path.name != "index.md"
    )
    for title, name in listed:
        assert (folder / name).read_text("utf-8").startswith(f"# {title}\n\nStatus: "), name


def test_records_of_decisions_are_short_and_name_modules_that_exist():
    for path in (ROOT / "docs" / "decisions").glob("*.md"):
        text = path.read_text("utf-8")
        assert len(text.split()) <= 1300, path.name
        modules = re.findall(r"`(?:python )?((?:[a-z_]+/)+[a-z_]+\.py)", text)
        assert {
            m for m in modules if not any((at / m).is_file() for at in (ROOT, PACKAGE))
        } == set()


def said(tree: ast.AST) -> Iterator[str]:
    """The texts of a source; "…" is what is put into them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [v.value if isinstance(v, ast.Constant) else "…" for v in node.values]
            yield re.sub("…+", "…", "".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"(%[sdgr])+", "…", node.value)


def test_troubleshooting_quotes_what_the_package_says():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    cells = re.findall(r"^(### .+|\| `[^|]+)", page, re.MULTILINE)
    quoted = {text for cell in cells for text in re.findall(r"`([^`]+)`", cell)}
    sources = (path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    texts = {text for source in sources for text in said(ast.parse(source))}
    of_torch = {
        "Invalid backend: '…', see torch._dynamo.list_backends() …",
        "Trying to resize storage that is not resizable",
    }
    assert {q for q in quoted if not any(q.strip("… ") in text for text in texts)} == of_torch


def test_the_glossary_is_sorted():
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = re.findall(r"^\*\*(.+?)\*\* ·", page, re.MULTILINE)
    assert len(words) > 30
    assert words == sorted(words, key=str.lower)

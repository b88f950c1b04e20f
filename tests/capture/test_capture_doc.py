"""The blocks of docs/capture.md run in order and print what the page shows."""

import contextlib
import dis
import io
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

import pytest
import torch

from tests.bench.programs import ROOT

PAGE = ROOT / "docs/capture.md"
HERE = {
    f"python{sys.version_info.major}.{sys.version_info.minor}",
    "torch" + ".".join(torch.__version__.split(".")[:2]),
}
BLOCK = re.compile(r"^```(python|text)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass
class Example:
    """One block of code with what the page says that it prints, and for which versions."""

    code: str
    shown: str | None = None
    only: str = ""

    @property
    def applies(self) -> bool:
        return self.shown is not None and HERE.issuperset(self.only.split())


def examples(text: str) -> Iterator[Example]:
    current = None
    for kind, info, body in BLOCK.findall(text):
        if kind == "python":
            if current is not None:
                yield current
            current = Example(body)
        else:
            assert current is not None
            assert current.shown is None
            current.shown, current.only = body, info.strip()
    if current is not None:
        yield current


def run(example: Example, namespace: dict[str, Any]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example.code, str(PAGE), "exec"), namespace)
    return printed.getvalue()


@pytest.fixture(scope="module")
def page() -> Iterator[tuple[list[tuple[Example, str]], dict[str, Any]]]:
    """Each example with what it printed, and the names that they defined."""
    torch._dynamo.reset()
    module = ModuleType("capture_page")
    sys.modules[module.__name__] = module  # Dynamo imports the modules of what it captures
    namespace = vars(module)
    yield [(e, run(e, namespace)) for e in examples(PAGE.read_text())], namespace
    del sys.modules[module.__name__]
    torch._dynamo.reset()


def test_the_page_shows_what_its_code_prints(page: Any) -> None:
    ran, _ = page
    compared = [(e.shown, printed) for e, printed in ran if e.applies]
    assert len(compared) >= 7
    for shown, printed in compared:
        assert printed == shown
    silent = [printed for e, printed in ran if e.shown is None]
    assert set(silent) == {""}


def names(code: CodeType) -> list[str]:
    return [i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"]


def test_on_any_python_the_bytecode_is_as_the_page_says(page: Any) -> None:
    _, namespace = page
    original, first = namespace["toy"].__code__, namespace["rewritten"]["toy"]
    assert names(original) == []
    called = [name for name in names(first) if name.startswith(("__compiled_fn", "__resume_at"))]
    assert [name.split("_")[2] for name in called] == ["compiled", "resume", "resume"]
    assert any("JUMP" in i.opname and "IF_FALSE" in i.opname for i in dis.get_instructions(first))
    assert not any(
        i.opname == "BINARY_OP" for i in dis.get_instructions(first) if i.argrepr in "+/"
    )
    second = namespace["rewritten"]["torch_dynamo_resume_in_toy"]
    assert [n.startswith("__compiled_fn") for n in names(second)].count(True) == 1


def test_a_page_that_shows_something_else_would_be_noticed() -> None:
    (first, second) = examples("```python\nprint(1)\n```\n```text\n2\n```\n```python\nx = 1\n```\n")
    assert run(first, {}) == "1\n" != first.shown
    assert second.shown is None
    assert not Example("", "x", "python2.7").applies

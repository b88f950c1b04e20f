"""Runs the blocks of a page of documentation, to compare what they print with what it shows.

A comment in the line above a block says what its code does not:

    <!-- given: torch, model=encoder -->   names from tests/given.py
    <!-- not run: needs an NVIDIA GPU -->  one of `NOT_RUN`
"""

import ast
import contextlib
import io
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tests.bench.programs import ROOT

NOT_RUN = {
    "needs an NVIDIA GPU",
    "needs a TPU",
    "needs two processes",
    "needs a package that is not installed",
    "needs a model and its tokenizer",
    "changes a class for the whole process",
}
BLOCK = re.compile(
    r"^(?:<!-- ([\w ]+): ([^\n]+) -->\n)?```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass
class Example:
    """One block of code with what the page says that it prints."""

    code: str
    shown: str | None = None
    printed: str = ""
    given: str = ""
    not_run: str = ""

    @property
    def applies(self) -> bool:
        return not self.not_run and self.shown is not None

    def names(self) -> Iterator[tuple[str, str]]:
        """What it is given: a name, and that of tests/given.py."""
        for text in filter(None, self.given.split(", ")):
            name, _, other = text.partition("=")
            yield name, other or name

    def compilations(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The backends and options of its calls of `torch.compile`, where they are literals."""
        for node in ast.walk(ast.parse(self.code)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.compile":
                values = {k.arg: k.value for k in node.keywords}
                with contextlib.suppress(ValueError, KeyError):
                    options = values.get("options", ast.Dict([], []))
                    yield ast.literal_eval(values["backend"]), ast.literal_eval(options)


def examples(text: str) -> Iterator[Example]:
    current = None
    for key, said, kind, body in BLOCK.findall(text):
        if kind == "python":
            if current is not None:
                yield current
            assert key in ("", "given", "not run"), f"not a comment of a block of code: {key!r}"
            current = Example(body, **({key.replace(" ", "_"): said} if key else {}))
        else:
            assert current is not None
            assert current.shown is None
            assert key == "", f"not a comment of a block of text: {key!r}"
            current.shown = body
    if current is not None:
        yield current


def run(example: Example, namespace: dict[str, Any], page: Path | str = "page") -> str:
    if not example.not_run:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(example.code, str(page), "exec"), namespace)
        example.printed = printed.getvalue()
    return example.printed


def given() -> dict[str, Any]:
    """The names of tests/given.py, with objects of their own."""
    return runpy.run_path(str(ROOT / "tests" / "given.py"))


def _given(value: Any) -> Any:
    return value() if getattr(value, "is_made", False) else value


@contextlib.contextmanager
def executed(
    name: str, change: Callable[[str], str] = str
) -> Iterator[tuple[list[Example], dict[str, Any]]]:
    """Runs a page, such as "docs/capture.md"; its examples and the names that they define.

    Args:
        name: Of the page.
        change: Is applied to its text.
    """
    path = ROOT / name
    torch._dynamo.reset()
    module = ModuleType("page_" + path.stem)
    sys.modules[module.__name__] = module  # Dynamo imports the modules of what it captures
    ran = list(examples(change(path.read_text(encoding="utf-8"))))
    known = given() if any(e.given for e in ran) else {}
    try:
        for example in ran:
            vars(module).update((name, _given(known[other])) for name, other in example.names())
            run(example, vars(module), path)
        yield ran, vars(module)
    finally:
        del sys.modules[module.__name__]
        torch._dynamo.reset()


def differences(ran: list[Example]) -> list[tuple[str | None, str]]:
    """What the page shows and what was printed instead; blocks without a text print nothing."""
    shown = [example for example in ran if example.applies or example.shown is None]
    return [(e.shown, e.printed) for e in shown if e.printed != (e.shown or "")]


def compared(ran: list[Example]) -> int:
    return sum(example.applies for example in ran)

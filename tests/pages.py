"""Runs the blocks of a page of documentation, to compare what they print with what it shows."""

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tests.bench.programs import ROOT

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
    printed: str = ""

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


def run(example: Example, namespace: dict[str, Any], page: Path | str = "page") -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example.code, str(page), "exec"), namespace)
    example.printed = printed.getvalue()
    return example.printed


@contextlib.contextmanager
def executed(name: str) -> Iterator[tuple[list[Example], dict[str, Any]]]:
    """Runs a page of docs/, such as "capture.md"; its examples and the names that they define."""
    path = ROOT / "docs" / name
    torch._dynamo.reset()
    module = ModuleType("page_" + path.stem)
    sys.modules[module.__name__] = module  # Dynamo imports the modules of what it captures
    ran = list(examples(path.read_text(encoding="utf-8")))
    try:
        for example in ran:
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

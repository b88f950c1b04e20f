"""Lines of the user's code, and the names that Dynamo gives to what stands there."""

import linecache
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from traceback import FrameSummary
from types import CodeType

import torch

_TORCH = str(Path(torch.__file__).parent)
_DYNAMO = str(Path(torch.__file__).parent / "_dynamo")
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)$")


@dataclass(frozen=True)
class Source:
    """A line of code.

    Attributes:
        file: Path of the file.
        line: Number of the line, from 1.
        code: Its text without indentation; empty if the file cannot be read.
    """

    file: str
    line: int
    code: str = ""

    def __str__(self) -> str:
        """Returns the line as "file:line, code"."""
        return f"{self.file}:{self.line}" + (f", {self.code}" if self.code else "")


def line_of(file: str, line: int) -> Source:
    """Returns the line of a file."""
    return Source(file, line, linecache.getline(file, line).strip())


def start_of(code: CodeType) -> Source | None:
    """The first line of a function; None for Dynamo's wrapper of a module of torch's own."""
    if code.co_filename.startswith(_DYNAMO):
        return None
    return line_of(code.co_filename, code.co_firstlineno)


def user_line(stack: Iterable[FrameSummary] | None) -> Source | None:
    """Returns the innermost line of a stack that is not in torch itself; None if there is none."""
    frames = [f for f in stack or () if not f.filename.startswith(_DYNAMO)]
    outside = [f for f in frames if not f.filename.startswith(_TORCH)]
    for frame in reversed(outside or frames):
        return line_of(frame.filename, frame.lineno or 0)
    return None


def function_name(code: CodeType) -> str:
    """Returns the name of a function; of a rest of one, "f, from line 7"."""
    if code.co_filename.startswith(_DYNAMO):
        return "the call itself"
    resumed = _RESUMED.search(code.co_name)
    return f"{resumed[1]}, from line {resumed[2]}" if resumed else code.co_qualname

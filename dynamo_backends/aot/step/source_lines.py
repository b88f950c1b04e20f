"""The user's lines: where a step calls torch, for people."""

import contextlib
import contextvars
import linecache
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


def user_frame() -> FrameType | None:
    """Returns the innermost frame of the call stack that is neither torch's nor this package's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
        frame = frame.f_back
    return frame


_recorded_line: contextvars.ContextVar[str] = contextvars.ContextVar("recorded_line", default="")


@contextlib.contextmanager
def recorded_at(line: str) -> Iterator[None]:
    """Sets the user's line at which the running calls were recorded (context manager)."""
    token = _recorded_line.set(line)
    try:
        yield
    finally:
        _recorded_line.reset(token)


def user_line() -> str:
    """Returns the user's line, for people: "file:line, code"."""
    recorded = _recorded_line.get()
    if recorded:
        return recorded
    frame = user_frame()
    if frame is None:
        return "an unknown line"
    return describe_line(frame.f_code.co_filename, frame.f_lineno)


def name_of(func: Callable[..., Any]) -> str:
    """Returns the name of a torch function or method for messages, such as "item"."""
    return getattr(func, "__name__", str(func)).strip("_")


def line_of(error: BaseException) -> str:
    """The innermost line of an error's traceback that is neither torch's nor this package's."""
    place, trace = "an unknown line", error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith((*_LIBRARIES, "<")):
            place = describe_line(name, trace.tb_lineno)
        trace = trace.tb_next
    return place


def describe_line(file: str, number: int) -> str:
    """Returns a place in the user's code as "file:line, code"."""
    code = line_of_code(file, number)
    return f"{file}:{number}" + (f", {code}" if code else "")


def line_of_code(file: str, number: int) -> str:
    """Returns a line of a file without its indentation; empty if the file cannot be read."""
    return linecache.getline(file, number).strip()

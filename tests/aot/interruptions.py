"""A signal at any instruction of Python that a step executes."""

import signal
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Instructions:
    """Sees every instruction executed in some files.

    Args:
        files: Parts of their names.
        at: The number of the instruction before which SIGINT comes; None: never.

    Attributes:
        count: How many instructions there were.
    """

    def __init__(self, files: Collection[str], at: int | None = None):
        self.count = 0
        self._files = files
        self._at = at

    def __call__(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        """For `sys.settrace`."""
        if event == "call":
            name = frame.f_code.co_filename
            if not any(file in name for file in self._files):
                return None
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
        elif event == "opcode":
            self.count += 1
            if self.count - 1 == self._at:
                signal.raise_signal(signal.SIGINT)
        return self


@contextmanager
def watched(instructions: Instructions) -> Iterator[None]:
    """Inside: the instructions are seen."""
    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 asks for it when tracing begins
    sys.settrace(instructions)
    try:
        yield
    finally:
        sys.settrace(before)

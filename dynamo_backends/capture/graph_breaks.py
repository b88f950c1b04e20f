"""Records graph breaks: where Dynamo stopped capturing, and why."""

import contextlib
import linecache
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import FrameSummary
from types import CodeType

import torch

from dynamo_backends._torch_private import dynamo_monitoring as private
from dynamo_backends.interface.errors import FallbackRefusedError

_TORCH = str(Path(torch.__file__).parent)
_DYNAMO = str(Path(torch.__file__).parent / "_dynamo")
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)$")


@dataclass(frozen=True)
class SourceLine:
    """One line of a source file: path, line number and text.

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


def read_source_line(file: str, line: int) -> SourceLine:
    """Reads a line of a file; its text is empty if the file cannot be read."""
    return SourceLine(file, line, linecache.getline(file, line).strip())


def first_line_of_code(code: CodeType) -> SourceLine | None:
    """Returns a function's first line; None for Dynamo's own wrapper code."""
    if code.co_filename.startswith(_DYNAMO):
        return None
    return read_source_line(code.co_filename, code.co_firstlineno)


def innermost_user_line(stack: Iterable[FrameSummary] | None) -> SourceLine | None:
    """Returns the innermost stack line outside torch; None if there is none."""
    frames = [f for f in stack or () if not f.filename.startswith(_DYNAMO)]
    outside = [f for f in frames if not f.filename.startswith(_TORCH)]
    for frame in reversed(outside or frames):
        return read_source_line(frame.filename, frame.lineno or 0)
    return None


def function_name(code: CodeType) -> str:
    """Returns a code object's name; of a resumed function as "f, from line 7"."""
    if code.co_filename.startswith(_DYNAMO):
        return "the compiled function itself"
    resumed = _RESUMED.search(code.co_name)
    return f"{resumed[1]}, from line {resumed[2]}" if resumed else code.co_qualname


@dataclass(frozen=True)
class GraphBreak:
    """A place where Dynamo stopped capturing: the reason, hints and the user's line.

    Attributes:
        reason: In a few words, such as "data-dependent branch".
        explanation: In a sentence or two; may be empty.
        hints: What can be done about it.
        function: The function that was being captured.
        source: The user's line; None if unknown.
        skipped: Nothing of the function could be captured, all of it runs in eager. Otherwise one
            graph ends here and the next begins after it.
        count: How often, over all calls and recompilations.
    """

    reason: str
    explanation: str
    hints: tuple[str, ...]
    function: str
    source: SourceLine | None
    skipped: bool = False
    count: int = 1

    def __str__(self) -> str:
        """Returns the reason and the line, and what can be done, in one or two sentences."""
        where = f" at {self.source}" if self.source else ""
        # Some of Dynamo's reasons have what can be done in their explanation alone.
        hint = next(iter(self.hints), self.explanation.partition("Reason: ")[2])
        remedy = f" {hint.removesuffix('.')}." if hint else ""
        return f"{self.reason} in {self.function}{where}.{remedy}"

    @property
    def is_intentional(self) -> bool:
        """Returns whether user code asked for it, as by `torch.compiler.disable`."""
        return any(words in self.reason for words in _WANTED)

    @property
    def raises_in_eager(self) -> bool:
        """Returns whether the code raises an exception there, in eager too."""
        return self.reason == "Observed exception"


_WANTED = ("torch.compiler.disable", "torch._dynamo.disable", "torch._dynamo.graph_break")


def parse_graph_break(
    text: str, stack: Iterable[FrameSummary] | None, code: CodeType, skipped: bool = False
) -> GraphBreak:
    """Parses Dynamo's message into a `GraphBreak`.

    Args:
        text: The reason as Dynamo gives it.
        stack: Where in the user's code.
        code: The code object that was being captured.
        skipped: Whether Dynamo gave up on all of it.
    """
    source = innermost_user_line(stack) or first_line_of_code(code)
    first, *later = re.split(r"\n+\*\*\* While handling this graph break.*?\*\*\*\n+", text)
    reason, explanation, hints = _parse(first)
    notes = [_parse(part)[1] for part in later]
    explanation = " ".join(filter(None, (explanation, *notes)))
    return GraphBreak(reason, explanation, hints, function_name(code), source, skipped)


@contextlib.contextmanager
def record_graph_breaks(
    code: CodeType, breaks: list[GraphBreak], refusing: str = ""
) -> Iterator[None]:
    """Records a frame's graph breaks into a list (context manager); may refuse them.

    Args:
        code: The code object of the frame.
        breaks: They are added to it.
        refusing: The backend that was asked for with `fallback="error"`; empty: without.

    Raises:
        FallbackRefusedError: There is one, and `fallback="error"` forbids it.
    """
    reasons = private.graph_break_reasons()
    start = len(reasons)
    try:
        yield
    except Exception as error:
        if not private.is_unsupported(error):
            raise
        stack = getattr(error, "real_stack", None)
        found = parse_graph_break(getattr(error, "msg", str(error)), stack, code, skipped=True)
        breaks.append(found)
        if refusing and found.raises_in_eager:  # eager is to raise it
            private.retry_frame_later(error)
        elif refusing:
            raise _refusal(refusing, found) from error
        raise
    new = [parse_graph_break(r.reason, r.user_stack, code) for r in reasons[start:]]
    breaks += new
    unwanted = next((found for found in new if not found.is_intentional), None)
    if refusing and unwanted:
        raise _refusal(refusing, unwanted)


def _refusal(backend: str, found: GraphBreak) -> FallbackRefusedError:
    return FallbackRefusedError(
        f"{backend}: a part of {found.function} would run in eager: {found} "
        'With fallback="eager" it would run there.'
    )


def merge_graph_breaks(breaks: Iterable[GraphBreak]) -> tuple[GraphBreak, ...]:
    """Merges equal graph breaks and adds up their counts, in order of the first."""
    counted: dict[GraphBreak, int] = {}
    for each in breaks:
        counted[each] = counted.get(each, 0) + each.count
    return tuple(replace(each, count=count) for each, count in counted.items())


def _parse(text: str) -> tuple[str, str, tuple[str, ...]]:
    """Reason, explanation and hints in a message of Dynamo's.

    The message has the reason in its first line and then indented paragraphs that begin with
    "Explanation:", "Hint:" or "Developer debug context:".
    """
    for pattern, reason, explanation in _TERSE:
        if re.match(pattern, text):
            return reason, explanation, ()
    reason, *rest = text.strip().splitlines()
    explanation, hints = "", []
    for paragraph in re.split(r"\n(?=  \w)", "\n" + "\n".join(rest)):
        label, _, content = paragraph.strip().partition(":")
        content = " ".join(content.split("\n\n")[0].split())
        if label == "Explanation":
            explanation = content
        elif label == "Hint":
            hints.append(content)
    return reason, explanation, tuple(hints)


# Reasons for which Dynamo has no sentence.
_TERSE = (
    (
        r"generic_jump Tensor",
        "data-dependent branch",
        "Control flow depends on the value of a tensor.",
    ),
    (
        r"generic_jump",
        "data-dependent branch",
        "Control flow depends on a value that is known only at run time.",
    ),
)

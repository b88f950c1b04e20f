"""Reads Dynamo's guards, and which one failed, into plain data."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

from dynamo_backends.aot.inputs import user_expression
from dynamo_backends.capture.graph_breaks import (
    SourceLine,
    first_line_of_code,
    function_name,
    innermost_user_line,
    read_source_line,
)


@dataclass(frozen=True)
class Guard:
    """A guard of a captured frame: its conditions and the user's line that needs it.

    Attributes:
        name: What is looked at, such as "x" or "self.training"; empty for global state.
        kind: Dynamo's name for the kind of check, such as "TENSOR_MATCH".
        checks: The conditions as Python expressions.
        function: The function whose graph it guards.
        source: The user's line for which the condition is needed; None if unknown.
    """

    name: str
    kind: str
    checks: tuple[str, ...]
    function: str
    source: SourceLine | None = None


@dataclass(frozen=True)
class Guards:
    """All guards of an explanation, and their counts by kind.

    Attributes:
        count: How many.
        kinds: How many of each kind, the most frequent first.
        guards: The guards.
    """

    count: int
    kinds: Mapping[str, int]
    guards: tuple[Guard, ...]


@dataclass(frozen=True)
class Recompilation:
    """A recompilation: which guard failed, of what kind, and at which line.

    Attributes:
        function: The function.
        kind: What had changed: "shape", "dtype", "constant", ...; "other" if that is not known.
        reason: The condition that failed, compared with the latest compilation.
        source: The user's line for which the condition was needed, else the function's first;
            None if neither is known.
        others: The conditions of earlier compilations that failed.
    """

    function: str
    kind: str
    reason: str
    source: SourceLine | None
    others: tuple[str, ...] = ()


def read_guards(guards: Collection[Any], code: CodeType) -> list[Guard]:
    """Converts Dynamo's guards of a frame to `Guard` records."""
    name = function_name(code)
    return [
        Guard(
            user_expression(guard.name),
            guard.create_fn_name(),
            tuple(user_expression(c) for c in guard.code_list or ()),
            name,
            innermost_user_line(guard.user_stack),
        )
        for guard in sorted(guards, key=lambda g: (g.name, g.create_fn_name()))
    ]


def summarize_guards(guards: Iterable[Guard]) -> Guards:
    """Counts guards by kind; returns the counts with all guards."""
    listed = tuple(guards)
    kinds = Counter(guard.kind for guard in listed)
    return Guards(len(listed), dict(kinds.most_common()), listed)


def parse_recompilation(
    failures: list[str], code: CodeType, known: Iterable[Guard]
) -> Recompilation:
    """Parses Dynamo's recompile reasons, latest first, into a `Recompilation`.

    Args:
        failures: One reason per earlier compilation of the code, the latest first.
        code: The code object.
        known: The guards of earlier compilations.
    """
    reasons = [_clean(failure) for failure in failures]
    source = (
        _line_in(failures[0]) or _line_of_guard(reasons[0], code, known) or first_line_of_code(code)
    )
    kind = next((k for pattern, k in _KINDS if re.search(pattern, reasons[0])), "other")
    return Recompilation(function_name(code), kind, reasons[0], source, tuple(reasons[1:]))


# The first that matches.
_KINDS = (
    (r"dtype mismatch", "dtype"),
    (r"device mismatch|dispatch key", "device"),
    (r"requires_grad mismatch", "requires_grad"),
    (r"(size|stride|rank) mismatch|\.size\(\)|\.stride\(\)|\.storage_offset\(\)", "shape"),
    (r"GLOBAL_STATE|grad_mode|autocast|default_dtype", "global state"),
    (r"___check_obj_id", "object"),
    (r"type mismatch|___check_type_id", "type"),
    (r"Duplicate tensor|aliasing", "aliasing"),
    (r"(==|!=| is | in )", "constant"),
)


def _clean(failure: str) -> str:
    first = failure.split("\nUser stack trace:")[0]
    first = re.sub(r"^\[?\d+/\d+\]?: ", "", first)
    first = re.sub(r"\s+# .*$", "", first, flags=re.DOTALL)
    return user_expression(first.strip())


def _line_in(failure: str) -> SourceLine | None:
    places = re.findall(r'File "([^"]+)", line (\d+)', failure)
    return read_source_line(places[-1][0], int(places[-1][1])) if places else None


def _line_of_guard(reason: str, code: CodeType, known: Iterable[Guard]) -> SourceLine | None:
    named = re.match(r"tensor '([^']+)'", reason)
    if named is None:
        return None
    wanted, function = user_expression(named[1]), function_name(code)
    lines = [g.source for g in known if g.function == function and g.name == wanted and g.source]
    return lines[0] if lines else None

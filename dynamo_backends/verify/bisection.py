"""Finds the operators of a block that compiled code computes wrongly, by compiling parts of it."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx

from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.graph.graph import Graph, source_line
from dynamo_backends.graph.partition import extract
from dynamo_backends.interface.executable import Executable
from dynamo_backends.verify.first_call import Comparison
from dynamo_backends.verify.reference import Replay

log = logging.getLogger("dynamo_backends")

Compile = Callable[[Graph], Executable]

_lock = fork_safe_lock()
_requests: list[object] = []


@contextlib.contextmanager
def bisecting() -> Iterator[None]:
    """Inside, in all threads: the operators are looked for that make a block wrong."""
    request = object()
    with _lock:
        _requests.append(request)
    try:
        yield
    finally:
        with _lock:
            _requests.remove(request)


def is_requested() -> bool:
    """Returns whether somebody is inside of `bisecting`."""
    return bool(_requests)


def smallest_wrong_region(
    graph: Graph, compile_part: Compile, inputs: Sequence[Any], reduced: bool = False
) -> str | None:
    """Returns the fewest calls in a row that are wrong when they are compiled alone, in words.

    First the shortest beginning of the block that is wrong is looked for, then the shortest end of
    that. Each is compiled and compared with eager, on eager's values.

    Args:
        graph: The block, functional.
        compile_part: Compiles a part; may raise.
        inputs: Inputs of the block.
        reduced: Whether the user admits bfloat16.

    Returns:
        None if no part is wrong by itself.
    """
    search = _Search(graph, compile_part, inputs, reduced)
    calls = len(graph.calls)
    if not search.wrong(0, calls):
        return None
    end = _first(lambda end: bool(search.wrong(0, end)), 1, calls)
    start = end - _first(lambda length: bool(search.wrong(end - length, end)), 1, end)
    return search.described(start, end)


def _first(holds: Callable[[int], bool], least: int, most: int) -> int:
    """Returns the least number for which something holds, given that it holds for the largest."""
    while least < most:
        middle = (least + most) // 2
        if holds(middle):
            most = middle
        else:
            least = middle + 1
    return most


class _Search:
    def __init__(self, graph: Graph, compile_part: Compile, inputs: Sequence[Any], reduced: bool):
        self._graph = graph
        self._compile = compile_part
        self._inputs = dict(zip((p.name for p in graph.placeholders), inputs, strict=True))
        self._reduced = reduced
        self._known: dict[tuple[int, int], str] = {}

    def wrong(self, start: int, end: int) -> str:
        """Returns what is wrong with the calls from `start` to `end`; empty if nothing is known."""
        if (start, end) not in self._known:
            try:
                self._known[start, end] = self._try(start, end)
            except Exception:  # what cannot be compiled alone
                log.debug("a part of a block cannot be compiled", exc_info=True)
                self._known[start, end] = ""
        return self._known[start, end]

    def _try(self, start: int, end: int) -> str:
        part = extract(self._graph, self._graph.calls[start:end], on_backend=True)
        values = self._values(start)
        given = [values[name] for name in part.reads]
        executable = self._compile(part.graph.copy())

        def run() -> Sequence[Any]:
            bound, _ = executable.bind([given[i] for i in part.graph.weights])
            return bound([given[i] for i in part.graph.activations])

        return Comparison(part.graph, self._reduced)(run, given).wrong

    def _values(self, end: int) -> dict[str, Any]:
        """Eager's values of what the calls before `end` leave for those after."""
        values = dict(self._inputs)
        if end:
            part = extract(self._graph, self._graph.calls[:end], on_backend=False)
            visit = lambda place, value: values.__setitem__(part.writes[place], value)  # noqa: E731
            Replay(part.graph.module)([self._inputs[name] for name in part.reads], visit)
        return values

    def described(self, start: int, end: int) -> str:
        calls = self._graph.calls[start:end]
        names = " and then ".join(_name(node) for node in calls[:4])
        if len(calls) > 4:
            names += f" and {len(calls) - 4} more"
        lines = dict.fromkeys(line for n in calls if (line := source_line(n)) is not None)
        where = "".join(f", at {line}" for line in list(lines)[:2])
        return f"{names}{where}: {self.wrong(start, end)}"


def _name(node: fx.Node) -> str:
    return str(node.target)

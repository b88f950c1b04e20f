"""Finds the operators of a block that are wrong, or slow, by compiling parts of it."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from dynamo_backends._torch_private import disable_current_modes, generated_forward
from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.graph.graph import Graph, source_line
from dynamo_backends.graph.partition import extract_part
from dynamo_backends.interface.executable import Executable
from dynamo_backends.verify.first_call import Comparison
from dynamo_backends.verify.reference import EagerInterpreter

log = logging.getLogger("dynamo_backends")

Compile = Callable[[Graph], Executable]

_lock = fork_safe_lock()
_requests: list[str] = []

clock = time.perf_counter
_RUNS = 4  # of each part, of which the fastest counts
_SLOW = 1.5


@contextlib.contextmanager
def bisecting(what: str = "wrong") -> Iterator[None]:
    """Requests a bisection of blocks that are found wrong, or slow (context manager).

    Args:
        what: "wrong" or "slow".
    """
    with _lock:
        _requests.append(what)
    try:
        yield
    finally:
        with _lock:
            _requests.remove(what)


def is_bisection_requested(what: str = "wrong") -> bool:
    """Returns whether this process is inside a `bisecting(what)` block."""
    return what in _requests


def smallest_wrong_region(
    graph: Graph, compile_part: Compile, inputs: Sequence[Any], reduced: bool = False
) -> str | None:
    """Finds the shortest run of calls that is wrong when compiled alone, as text.

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
    return _Search(graph, compile_part, inputs, reduced).smallest()


def smallest_slow_region(
    graph: Graph, compile_part: Compile, inputs: Sequence[Any]
) -> tuple[float, float, str | None] | None:
    """Finds the shortest run of calls that loses half of a slow block's time.

    Args:
        graph: The block, functional.
        compile_part: Compiles a part; may raise.
        inputs: Inputs of the block.

    Returns:
        Seconds of the block and of eager, and the calls in words, None if no part is slow by
        itself; None if the block takes less than 1.5 times eager's time.
    """
    search = _SlowSearch(graph, compile_part, inputs, False)
    own, eager = search.times(0, len(graph.calls))
    if own < _SLOW * eager:
        return None
    search.lost = own - eager
    return own, eager, search.smallest()


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

    def smallest(self) -> str | None:
        """Returns the fewest calls in a row for which `wrong` says something, in words."""
        calls = len(self._graph.calls)
        if not self.wrong(0, calls):
            return None
        end = _first(lambda end: bool(self.wrong(0, end)), 1, calls)
        start = end - _first(lambda length: bool(self.wrong(end - length, end)), 1, end)
        return self.described(start, end)

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
        graph, given, bind = self._part(start, end)
        return Comparison(graph, self._reduced)(lambda: bind()(), given).wrong

    def _part(
        self, start: int, end: int
    ) -> tuple[Graph, list[Any], Callable[[], Callable[[], Sequence[Any]]]]:
        """Returns the graph of some calls, its inputs, and what binds them to compiled code."""
        part = extract_part(self._graph, self._graph.calls[start:end], on_backend=True)
        values = self._values(start)
        given = [values[name] for name in part.reads]
        executable = self._compile(part.graph.copy())

        def bind() -> Callable[[], Sequence[Any]]:
            bound, _ = executable.bind([given[i] for i in part.graph.weights])
            return lambda: bound([given[i] for i in part.graph.activations])

        return part.graph, given, bind

    def _values(self, end: int) -> dict[str, Any]:
        """Returns eager's values that calls before `end` leave for later calls, by name."""
        values = dict(self._inputs)
        if end:
            part = extract_part(self._graph, self._graph.calls[:end], on_backend=False)
            visit = lambda place, value: values.__setitem__(part.writes[place], value)  # noqa: E731
            EagerInterpreter(part.graph.module)([self._inputs[name] for name in part.reads], visit)
        return values

    def described(self, start: int, end: int) -> str:
        calls = self._graph.calls[start:end]
        names = " and then ".join(_name(node) for node in calls[:4])
        if len(calls) > 4:
            names += f" and {len(calls) - 4} more"
        lines = dict.fromkeys(line for n in calls if (line := source_line(n)) is not None)
        where = "".join(f", at {line}" for line in list(lines)[:2])
        return f"{names}{where}: {self.wrong(start, end)}"


class _SlowSearch(_Search):
    """Searches for the part that loses at least half of the time."""

    lost = math.inf

    def times(self, start: int, end: int) -> tuple[float, float]:
        """Returns the seconds that compiled code and eager take for some calls."""
        graph, given, bind = self._part(start, end)
        run, eager = bind(), generated_forward(graph.module)
        with disable_current_modes(), torch.no_grad():
            return _fastest(run), _fastest(lambda: eager(*given))

    def _try(self, start: int, end: int) -> str:
        own, eager = self.times(start, end)
        if own - eager < self.lost / 2:
            return ""
        return (
            f"{own / eager:.1f} times eager's time ({own * 1e3:.3g} ms, eager {eager * 1e3:.3g} ms)"
        )


def _fastest(run: Callable[[], object]) -> float:
    """Returns the seconds of the fastest of several runs."""

    def took() -> float:
        start = clock()
        run()
        return clock() - start

    return min(took() for _ in range(_RUNS))


def _name(node: fx.Node) -> str:
    return str(node.target)

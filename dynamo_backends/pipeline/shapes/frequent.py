"""Executables for sizes that come often, beside the program that serves all sizes.

What a vendor compiles for one set of sizes may be faster than what it compiles for all. Samples of
the calls tell how much time is spent on which sizes. Where that is so much that the gain, if there
is one, would have paid for a compilation, an executable is compiled beside the calls. It takes
calls in turn with the program for all, and stays if it is clearly faster. If it is not, twice in a
row, the graph gets no more of them.
"""

import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.liveness import tensor_bytes
from dynamo_backends.graph.specialize import shape_key
from dynamo_backends.interface.report import Served
from dynamo_backends.interface.stance import compiles_nothing
from dynamo_backends.pipeline.shapes.padded import COMPILATION_S, KNOWN
from dynamo_backends.pipeline.shapes.strategy import Compiled
from dynamo_backends.runtime.lru import LRU

GAIN = 0.15
"""By so much the program for all sizes has to be slower than one for some; a part of the latter."""

EVERY = 8
"""Of so many calls one is timed."""

TURNS = 9
"""So many calls each of the two programs takes until it is known which one is faster."""

FAILURES = 2
"""After so many executables in a row that are no faster there are no more."""

BYTES = 256 << 20
"""So much the weights of all these executables may take: each prepares its own."""


class FrequentSizes:
    """The sizes of a graph's calls, and executables for some of them.

    Args:
        graph: With symbolic shapes.
        most: So many executables stay; the one used least recently leaves.
        submit: Has one compiled for sizes, by their key and a call's values, which is then `add`ed
            or has `failed`; returns whether it will be.
    """

    def __init__(self, graph: Graph, most: int, submit: Callable[[Hashable, Sequence[Any]], bool]):
        self._varying = [i for i, place in enumerate(graph.placeholders) if _varies(place)]
        self._submit = submit
        self._calls = self._failures = 0
        self._compilation_s = COMPILATION_S
        self._spent: LRU[Hashable, float] = LRU(KNOWN)
        self._asked: set[Hashable] = set()
        self._open: set[Hashable] = set()  # those asked for of which it is not known what they gain
        weights = sum(tensor_bytes(graph.placeholders[i].meta["val"]) for i in graph.weights)
        self._rivals: LRU[Hashable, Rival] = LRU(min(most, BYTES // max(1, weights)))

    @property
    def is_over(self) -> bool:
        """Whether nothing is gained by executables for some sizes, or there is no memory."""
        return self._failures >= FAILURES or not self._rivals.most

    def choose(self, program: Compiled, args: Sequence[Any]) -> Compiled:
        """Returns what runs a call.

        Args:
            program: That for all sizes.
            args: Of the call.
        """
        self._calls += 1
        is_sample = self._calls % EVERY == 0
        if not (is_sample or len(self._rivals)):
            return program
        key = shape_key([args[i] for i in self._varying])
        rival = self._rivals.get(key)
        if rival is not None:
            return rival
        if not is_sample or self.is_over:
            return program
        is_wanted = self._is_worth_it(key) and not compiles_nothing()
        if is_wanted and self._submit(key, args):
            self._asked.add(key)
            self._open.add(key)
        return _Sample(program, lambda seconds: self._note(key, seconds))

    def _is_worth_it(self, key: Hashable) -> bool:
        """Returns whether to ask for an executable; no more are open than may fail."""
        may_ask = key not in self._asked and len(self._asked) < KNOWN
        has_room = self._failures + len(self._open) < FAILURES
        return may_ask and has_room and self._pays(GAIN * (self._spent.get(key) or 0.0))

    def _pays(self, gained: float) -> bool:
        return gained >= self._compilation_s

    def _note(self, key: Hashable, seconds: float) -> None:
        self._spent.put(key, (self._spent.get(key) or 0.0) + EVERY * seconds)

    def add(self, key: Hashable, exact: Compiled, program: Compiled, seconds: float) -> None:
        """Has an executable take calls in turn with the program for all sizes.

        Args:
            key: Of its sizes.
            exact: The executable.
            program: The one for all.
            seconds: Of a processor, that compiling it took; the next ones have to gain so much.
        """
        self._compilation_s = max(self._compilation_s, seconds)
        self._rivals.put(key, Rival(exact, program, lambda won: self._decided(key, won)))

    def failed(self, key: Hashable) -> None:
        """Notes that one could not be compiled, or is no faster."""
        self._open.discard(key)
        self._failures += 1

    def _decided(self, key: Hashable, has_won: bool) -> None:
        if has_won:
            self._open.discard(key)
            self._failures = 0
        else:
            self.failed(key)
            self._rivals.drop(key)


class _Sample:
    """A call that is timed."""

    def __init__(self, program: Compiled, note: Callable[[float], None]):
        self._program = program
        self._note = note

    @property
    def served(self) -> Served:
        """Of the program."""
        return self._program.served

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Runs it; clears the list of arguments."""
        start = time.perf_counter()
        results = self._program(args)
        self._note(time.perf_counter() - start)
        return results


class Rival:
    """An executable for some sizes and the program for all, in turn until one is the faster.

    Args:
        exact: The executable.
        program: The one for all.
        decided: Told once whether the executable has won.
    """

    def __init__(self, exact: Compiled, program: Compiled, decided: Callable[[bool], None]):
        self._programs = (exact, program)
        self._seconds: tuple[list[float], list[float]] = ([], [])
        self._decided = decided
        self._winner: Compiled | None = None
        self._lock = fork_safe_lock()

    @property
    def served(self) -> Served:
        """Of what runs the next call."""
        return (self._winner or self._programs[self._turn]).served

    @property
    def _turn(self) -> int:
        exact, general = map(len, self._seconds)
        return int(exact > general)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Runs the graph; clears the list of arguments."""
        if self._winner is not None:
            return self._winner(args)
        turn = self._turn
        start = time.perf_counter()
        results = self._programs[turn](args)
        self._seconds[turn].append(time.perf_counter() - start)
        if min(map(len, self._seconds)) > TURNS:  # the first one is compared with eager
            self._decide()
        return results

    def _decide(self) -> None:
        with self._lock:
            if self._winner is not None:  # another thread did
                return
            exact, general = (statistics.median(times[1:]) for times in self._seconds)
            has_won = general >= (1 + GAIN) * exact
            self._winner = self._programs[not has_won]
        self._decided(has_won)


def _varies(place: torch.fx.Node) -> bool:
    value = place.meta.get("val")
    if isinstance(value, Tensor):
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    return isinstance(value, torch.SymInt | int)

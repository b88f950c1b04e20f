"""The sizes with which a graph with symbols is called before it is tuned, and how often."""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor

from dynamo_backends import _torch_private as private
from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.autotune.arguments import copies

log = logging.getLogger("dynamo_backends")

MOST = 8
"""So many different sizes are waited for, and decided over, at most."""

WAIT_S = 1.0
"""Seconds since the first call after which tuning begins with the sizes that came."""

_LARGE = 1 << 24  # bytes of one call's inputs that are copied in a call
_KNOWN = 10_000  # sizes of which it is remembered whether they are served
_CALLS = 16  # of one pass over all sizes, about

Key = tuple[int, ...]


class Traffic:
    """What calls a graph with symbols gets.

    Args:
        names: Of the inputs that are symbols, by position, as in the user's code.
        static: Positions of parameters and buffers, which are not copied.
        values: Inputs of the call that was captured.
    """

    def __init__(self, names: Mapping[int, str], static: Collection[int], values: Sequence[Any]):
        self.places = tuple(names)
        self._names = tuple(names.values())
        self._static = static
        self._inputs = {self.key(values): list(values)}
        self._counts: dict[Key, int] = dict.fromkeys(self._inputs, 0)
        self._lock = fork_safe_lock()
        self._begun = time.monotonic()
        self._is_closed = False

    def key(self, args: Sequence[Any]) -> Key:
        """Returns the sizes of a call."""
        return tuple(int(args[i]) for i in self.places)

    def note(self, args: Sequence[Any]) -> None:
        """Counts a call, and copies its inputs if its sizes are new."""
        if self._is_closed:
            return
        key = self.key(args)
        with self._lock:
            if not any(self._counts.values()):
                self._begun = time.monotonic()
            if key in self._counts:
                self._counts[key] += 1
            elif len(self._counts) < MOST and self._bytes(args) < _LARGE:
                with torch.no_grad(), private.disable_current_modes():
                    self._inputs[key] = copies(args, self._static)
                self._counts[key] = 1

    def _bytes(self, args: Sequence[Any]) -> int:
        copied = [x for i, x in enumerate(args) if i not in self._static]
        return sum(x.numel() * x.element_size() for x in copied if isinstance(x, Tensor))

    @property
    def suffices(self) -> bool:
        """Whether enough calls came, or enough time passed."""
        return len(self._counts) >= MOST or time.monotonic() > self._begun + WAIT_S

    def close(self) -> None:
        """Ends the counting."""
        with self._lock:
            self._is_closed = True

    def seen(self) -> list[tuple[list[Any], int]]:
        """Inputs for each of the sizes, those of the capture first, and how many calls had them."""
        with self._lock:
            return [(values, max(1, self._counts[key])) for key, values in self._inputs.items()]

    def __str__(self) -> str:
        """Returns all sizes with their calls, in one line."""
        with self._lock:
            counts = dict(self._counts)
        names = ", ".join(self._names)
        calls = ", ".join(f"{_text(key)} in {_calls(max(1, n))}" for key, n in counts.items())
        return f"{names if len(self._names) == 1 else f'({names})'} = {calls}"


def _text(key: Key) -> str:
    return str(key[0]) if len(key) == 1 else str(key)


def _calls(number: int) -> str:
    return "1 call" if number == 1 else f"{number} calls"


def schedule(counts: Sequence[int]) -> list[int]:
    """An order of calls that has each size about as often as it occurred, but at least once.

    Args:
        counts: How often each one did.
    """
    total = sum(counts)
    times = counts
    if total > _CALLS:
        times = [max(1, round(_CALLS * count / total)) for count in counts]
    # Evenly, so that no size lives off the cache that it filled itself.
    places = [((k + 0.5) / n, i) for i, n in enumerate(times) for k in range(n)]
    return [i for _, i in sorted(places)]


class Assumed:
    """What a compiled graph assumes of sizes beyond Dynamo's guards.

    Args:
        assumptions: Over the symbols.
        numbers: By position, the inputs that are symbols.
    """

    def __init__(self, assumptions: Sequence[sympy.Basic], numbers: Mapping[int, sympy.Symbol]):
        self.places = tuple(numbers)
        self._symbols = tuple(numbers.values())
        self._assumptions = tuple(a for a in dict.fromkeys(assumptions) if a != sympy.true)
        self._known: dict[Key, bool] = {}

    def __bool__(self) -> bool:
        """Returns whether any size is assumed to be a constant or equal to another."""
        return bool(self._assumptions)

    @property
    def unknown(self) -> set[sympy.Basic]:
        """Symbols of which something is assumed, and that no input tells."""
        free = set().union(*(a.free_symbols for a in self._assumptions))
        return free - set(self._symbols)

    def holds(self, args: Sequence[Any]) -> bool:
        """Returns whether it is right for the sizes of a call."""
        key = tuple(int(args[i]) for i in self.places)
        holds = self._known.get(key)
        if holds is None:
            values = dict(zip(self._symbols, map(sympy.Integer, key), strict=True))
            holds = all(a.xreplace(values) == sympy.true for a in self._assumptions)
            if len(self._known) < _KNOWN:
                self._known[key] = holds
        return holds

    def __str__(self) -> str:
        """In one line."""
        return " and ".join(map(str, self._assumptions))


def counted(run: Callable[..., Any], traffic: Traffic) -> Callable[..., Any]:
    """Returns what runs a graph, and notes its calls."""

    def call(*args: Any) -> Any:
        traffic.note(args)
        return run(*args)

    return call


def within(
    assumed: Assumed, run: Callable[..., Any], eager: Callable[..., Any], name: str
) -> Callable[..., Any]:
    """Returns a winner for the sizes that it is right for, and eager for others."""
    is_told = False

    def call(*args: Any) -> Any:
        nonlocal is_told
        if assumed.holds(args):
            return run(*args)
        if not is_told:
            is_told = True
            log.warning("autotune: %s is right where %s; other sizes run in eager", name, assumed)
        return eager(*args)

    return call

"""Sizes of graphs with symbols: which calls had them, and what a compiled graph assumes of them."""

import logging
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.aot.inputs import inspect_captured, user_expression
from dynamo_backends.autotune.trial_inputs import clone_inputs

log = logging.getLogger("dynamo_backends")

MAX_SIZES = 8
"""Largest number of different sizes that tuning waits for and decides over."""

WAIT_S = 1.0
"""Seconds since the first call after which tuning begins with the sizes that came."""

_LARGE = 1 << 24  # bytes of one call's inputs that are copied in a call
_KNOWN = 10_000  # sizes of which it is remembered whether they are served
_CALLS = 16  # of one pass over all sizes, about

Key = tuple[int, ...]


class ObservedSizes:
    """Counts the sizes of calls of a dynamic-shape graph; keeps inputs of each size.

    Args:
        names: Names of the inputs that are symbols, by position, as in the user's code.
        static: Positions of parameters and buffers, which are not copied.
        values: Inputs of the call that was captured.
    """

    def __init__(self, names: Mapping[int, str], static: Collection[int], values: Sequence[Any]):
        self.places = tuple(names)
        self._names = tuple(names.values())
        self._static = static
        self._inputs = {self.sizes_of_call(values): list(values)}
        self._counts: dict[Key, int] = dict.fromkeys(self._inputs, 0)
        self._lock = fork_safe_lock()
        self._begun = time.monotonic()
        self._is_closed = False

    def sizes_of_call(self, args: Sequence[Any]) -> Key:
        """Returns the values of a call's size inputs, as a tuple."""
        return tuple(int(args[i]) for i in self.places)

    def record_call(self, args: Sequence[Any]) -> None:
        """Counts a call by its sizes; copies its inputs if the sizes are new."""
        if self._is_closed:
            return
        key = self.sizes_of_call(args)
        with self._lock:
            if not any(self._counts.values()):
                self._begun = time.monotonic()
            if key in self._counts:
                self._counts[key] += 1
            elif len(self._counts) < MAX_SIZES and self._bytes(args) < _LARGE:
                with torch.no_grad(), private.disable_current_modes():
                    self._inputs[key] = clone_inputs(args, self._static)
                self._counts[key] = 1

    def _bytes(self, args: Sequence[Any]) -> int:
        copied = [x for i, x in enumerate(args) if i not in self._static]
        return sum(x.numel() * x.element_size() for x in copied if isinstance(x, Tensor))

    @property
    def has_enough_calls(self) -> bool:
        """Returns whether tuning may begin: enough sizes occurred, or time passed."""
        return len(self._counts) >= MAX_SIZES or time.monotonic() > self._begun + WAIT_S

    def stop_recording(self) -> None:
        """Stops counting calls and copying inputs."""
        with self._lock:
            self._is_closed = True

    def inputs_by_size(self) -> list[tuple[list[Any], int]]:
        """Returns pairs of inputs and number of calls, one per set of sizes."""
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


def interleave_by_count(counts: Sequence[int]) -> list[int]:
    """Returns indices of sizes in an evenly mixed order, each as often as it occurred.

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


class SizeAssumptions:
    """Conditions on symbolic sizes that compiled code needs beyond Dynamo's guards.

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
    def unresolved_symbols(self) -> set[sympy.Basic]:
        """Returns the symbols in the conditions that no input's value gives."""
        free = set().union(*(a.free_symbols for a in self._assumptions))
        return free - set(self._symbols)

    def allows_sizes(self, args: Sequence[Any]) -> bool:
        """Returns whether the conditions hold for the sizes of a call."""
        key = tuple(int(args[i]) for i in self.places)
        holds = self._known.get(key)
        if holds is None:
            values = dict(zip(self._symbols, map(sympy.Integer, key), strict=True))
            holds = all(a.xreplace(values) == sympy.true for a in self._assumptions)
            if len(self._known) < _KNOWN:
                self._known[key] = holds
        return holds

    def __str__(self) -> str:
        """Returns the sizes in one line."""
        return " and ".join(map(str, self._assumptions))


def wrap_with_call_recording(run: Callable[..., Any], traffic: ObservedSizes) -> Callable[..., Any]:
    """Wraps a function so that the sizes of its calls are recorded."""

    def call(*args: Any) -> Any:
        traffic.record_call(args)
        return run(*args)

    return call


def guard_with_assumptions(
    assumed: SizeAssumptions, run: Callable[..., Any], eager: Callable[..., Any], name: str
) -> Callable[..., Any]:
    """Wraps a winner so that calls that break its size assumptions run in eager."""
    is_told = False

    def call(*args: Any) -> Any:
        nonlocal is_told
        if assumed.allows_sizes(args):
            return run(*args)
        if not is_told:
            is_told = True
            log.warning(
                "autotune: %s is valid only where %s; other sizes run in eager", name, assumed
            )
        return eager(*args)

    return call


# The symbols of a captured graph, and of one that is captured anew.

_SIZE = re.compile(r"(?P<tensor>.+)\.size\(\)\[(?P<dim>\d+)\]")
_REBUILT = re.compile(r"(?:weight|activation)_(?P<place>\d+)")


@dataclass(frozen=True)
class SymbolDescription:
    """The symbolic sizes of a graph's inputs, as JSON-serializable types.

    Attributes:
        values: For each input: its own symbol, a tensor's sizes, or nothing.
        dims: See `CapturedSymbols.dims`; by positions as text.
        sizes: For inputs that are the size of another one (by positions as text): the position of
            that one, and the dimension.
    """

    values: list[list[str]]
    dims: Mapping[str, list[str]]
    sizes: Mapping[str, Sequence[int]]


def describe_symbols(
    captured: fx.GraphModule, symbols: private.CapturedSymbols
) -> SymbolDescription:
    """Makes the description of a captured graph's symbols; called during Dynamo's call."""
    dims = {str(i): kinds for i, kinds in symbols.dims.items()}
    sizes = {str(i): place for i, place in _sizes(captured).items()}
    return SymbolDescription(_values(captured), dims, sizes)


def _values(captured: fx.GraphModule) -> list[list[str]]:
    found = []
    for place in captured.graph.find_nodes(op="placeholder"):
        value = place.meta.get("example_value")
        is_number = isinstance(value, torch.SymInt)
        sizes = value.shape if isinstance(value, Tensor) else [value] if is_number else ()
        found.append([str(size) for size in sizes])
    return found


def has_symbols(captured: fx.GraphModule) -> bool:
    """Returns whether an input is a SymInt, or a tensor with a symbolic size."""
    return any(not size.isdigit() for sizes in _values(captured) for size in sizes)


def exact_size_bounds(
    captured: fx.GraphModule, sets: Sequence[Sequence[Any]]
) -> dict[str, dict[int, tuple[int, ...]]]:
    """Returns bucket bounds that equal the known sizes, so that these are not padded.

    Args:
        captured: A graph of Dynamo's.
        sets: Inputs of it, of these sizes.

    Returns:
        By the inputs' names and their dimensions; nothing of a graph without symbols.
    """
    found: dict[str, dict[int, tuple[int, ...]]] = {}
    for place, values in zip(
        inspect_captured(captured).inputs, zip(*sets, strict=True), strict=True
    ):
        varying = [dim for dim, symbol in enumerate(place.symbols) if symbol]
        if varying:
            sizes = {dim: {max(int(x.shape[dim]), 1) for x in values} for dim in varying}
            found[place.name] = {dim: tuple(sorted(s)) for dim, s in sizes.items()}
    return found


def _sizes(captured: fx.GraphModule) -> dict[int, tuple[int, int]]:
    """Maps inputs that are sizes of a tensor to the tensor's position and dimension."""
    places = captured.graph.find_nodes(op="placeholder")
    sources = [private.dynamo_source_name(place) or "" for place in places]
    found = {}
    for i, source in enumerate(sources):
        size = _SIZE.fullmatch(source)
        if size is not None and size["tensor"] in sources:
            found[i] = sources.index(size["tensor"]), int(size["dim"])
    return found


def match_recaptured_inputs(captured: fx.GraphModule, old: SymbolDescription) -> list[int]:
    """Returns, for each input of a re-captured graph, its position in the original.

    Args:
        captured: The new one.
        old: The description of the graph that it was made of.

    Returns:
        For each input the old position.

    Raises:
        ValueError: It has other symbols.
    """
    places = captured.graph.find_nodes(op="placeholder")
    values, sizes = _values(captured), _sizes(captured)
    of_size = {tuple(size): int(place) for place, size in old.sizes.items()}
    found: list[int] = []
    for i, place in enumerate(places):
        named = _REBUILT.search(private.dynamo_source_name(place) or "")
        if named is None:
            raise ValueError(f"the graph copy has an unknown input: {place.name}")
        position = int(named["place"])
        if i in sizes:
            position = _position(old, of_size, position, sizes[i][1])
        found.append(position)
    if sorted(found) != list(range(len(old.values))) or not _alike(old.values, values, found):
        raise ValueError("the graph copy was captured with different symbols")
    return found


def _position(
    old: SymbolDescription, of_size: Mapping[tuple[int, ...], int], tensor: int, dim: int
) -> int:
    """Returns the input that is a size of another one, or of one with the same size."""
    exact = of_size.get((tensor, dim))
    if exact is not None:
        return exact
    text = old.values[tensor][dim]
    return next((p for p in of_size.values() if old.values[p] == [text]), -1)


def _alike(old: Sequence[list[str]], new: Sequence[list[str]], places: Sequence[int]) -> bool:
    """Returns whether sizes are the same, but for the names of symbols."""
    names: dict[str, str] = {}
    for place, sizes in zip(places, new, strict=True):
        if len(sizes) != len(old[place]):
            return False
        for before, size in zip(old[place], sizes, strict=True):
            if names.setdefault(before, size) != size or before.isdigit() != size.isdigit():
                return False
    numbers = all(before == size for before, size in names.items() if before.isdigit())
    return numbers and len(set(names.values())) == len(names)


class GraphSymbols:
    """Keeps a captured graph's symbols so that it can be compiled after Dynamo's call.

    Args:
        captured: The graph.
        inputs: As Dynamo gives them.
        values: Copies of the tensors, and numbers.
        static: Positions of parameters and buffers.

    Attributes:
        traffic: Sizes of the calls.
        description: For the process that tunes.
    """

    def __init__(
        self,
        captured: fx.GraphModule,
        inputs: Sequence[Any],
        values: Sequence[Any],
        static: Collection[int],
    ):
        self._captured = private.CapturedSymbols(inputs)
        places = captured.graph.find_nodes(op="placeholder")
        names = {
            i: user_expression(private.dynamo_source_name(places[i]) or places[i].name)
            for i, value in enumerate(inputs)
            if isinstance(value, torch.SymInt)
        }
        self.traffic = ObservedSizes(names, static, values)
        self.description: SymbolDescription = describe_symbols(captured, self._captured)

    def context(self, inputs: Sequence[Any]) -> Any:
        """See `CapturedSymbols.context`."""
        return self._captured.context(inputs)

    @property
    def assumptions_since_capture(self) -> SizeAssumptions:
        """Returns the conditions on sizes that were added after Dynamo's guards."""
        return SizeAssumptions(self._captured.new_assumptions(), self._captured.numbers)

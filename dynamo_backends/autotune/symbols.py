"""The symbols of a captured graph, and whether a graph that is captured anew has the same ones."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends.aot.inputs import inspect_captured, readable
from dynamo_backends.autotune.traffic import Assumed, Traffic

_SIZE = re.compile(r"(?P<tensor>.+)\.size\(\)\[(?P<dim>\d+)\]")
_REBUILT = re.compile(r"(?:weight|activation)_(?P<place>\d+)")


@dataclass(frozen=True)
class Description:
    """The symbols of the inputs of a graph, in types that JSON has.

    Attributes:
        values: For each input: its own symbol, a tensor's sizes, or nothing.
        dims: See `CapturedSymbols.dims`; by positions as text.
        sizes: For inputs that are the size of another one (by positions as text): the position of
            that one, and the dimension.
    """

    values: list[list[str]]
    dims: Mapping[str, list[str]]
    sizes: Mapping[str, Sequence[int]]


def described(captured: fx.GraphModule, symbols: private.CapturedSymbols) -> Description:
    """Returns the symbols of a graph, inside a backend called by Dynamo."""
    dims = {str(i): kinds for i, kinds in symbols.dims.items()}
    sizes = {str(i): place for i, place in _sizes(captured).items()}
    return Description(_values(captured), dims, sizes)


def _values(captured: fx.GraphModule) -> list[list[str]]:
    found = []
    for place in captured.graph.find_nodes(op="placeholder"):
        value = place.meta.get("example_value")
        is_number = isinstance(value, torch.SymInt)
        sizes = value.shape if isinstance(value, Tensor) else [value] if is_number else ()
        found.append([str(size) for size in sizes])
    return found


def has_symbols(captured: fx.GraphModule) -> bool:
    """Returns whether an input of a graph is a symbol, or has a size that is one."""
    return any(not size.isdigit() for sizes in _values(captured) for size in sizes)


def bounds_of(
    captured: fx.GraphModule, sets: Sequence[Sequence[Any]]
) -> dict[str, dict[int, tuple[int, ...]]]:
    """Bounds with which sizes that are known are not rounded up (see `Buckets.named`).

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
    """Inputs that are sizes of others: by position, of which one and of which dimension."""
    places = captured.graph.find_nodes(op="placeholder")
    sources = [private.dynamo_source_name(place) or "" for place in places]
    found = {}
    for i, source in enumerate(sources):
        size = _SIZE.fullmatch(source)
        if size is not None and size["tensor"] in sources:
            found[i] = sources.index(size["tensor"]), int(size["dim"])
    return found


def old_places(captured: fx.GraphModule, old: Description) -> list[int]:
    """Which inputs of a graph those of one are that was made by `rebuilt` and captured anew.

    Args:
        captured: The new one.
        old: Of the graph that it was made of.

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
            raise ValueError(f"an input of the copy of the graph is unknown: {place.name}")
        position = int(named["place"])
        if i in sizes:
            position = _position(old, of_size, position, sizes[i][1])
        found.append(position)
    if sorted(found) != list(range(len(old.values))) or not _alike(old.values, values, found):
        raise ValueError("the copy of the graph was captured with other symbols")
    return found


def _position(
    old: Description, of_size: Mapping[tuple[int, ...], int], tensor: int, dim: int
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


class Symbols:
    """What is known of a graph with symbols, to compile it after Dynamo's call.

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
            i: readable(private.dynamo_source_name(places[i]) or places[i].name)
            for i, value in enumerate(inputs)
            if isinstance(value, torch.SymInt)
        }
        self.traffic = Traffic(names, static, values)
        self.description: Description = described(captured, self._captured)

    def context(self, inputs: Sequence[Any]) -> Any:
        """See `CapturedSymbols.context`."""
        return self._captured.context(inputs)

    @property
    def assumed(self) -> Assumed:
        """What was assumed of sizes since the capture."""
        return Assumed(self._captured.assumed(), self._captured.numbers)

"""What decides which program serves a set of sizes: an ordered list of strategies.

`CompiledGraph` asks one strategy after the other. Where none has a program for the sizes, one is
compiled for them, which then serves these sizes or, where the vendor can, a range.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.sequence import PASSES
from dynamo_backends.interface.report import Served
from dynamo_backends.interface.stages import PASSES as PASSES_STAGE
from dynamo_backends.interface.stages import stage


class Compiled(Protocol):
    """Runs a graph."""

    @property
    def served(self) -> Served:
        """Counts its calls."""
        ...

    def __call__(self, args: list[Any], /) -> Sequence[Any]:
        """Runs it; clears the list of arguments."""
        ...


class Comparable(Compiled, Protocol):
    """What runs a graph, and is compared with eager."""

    def verify_again(self) -> None:
        """See `Program.verify_again`."""


class Request:
    """A set of sizes for which a program is wanted.

    Args:
        key: Tells it apart from other sets (see `graph.specialize.shape_key`).
        values: One per placeholder of the captured graph.
        make: Makes a copy of the graph for these sizes.
    """

    def __init__(self, key: Hashable, values: Sequence[Any], make: Callable[[], Graph]):
        self.key = key
        self.values = values
        self._make = make

    @functools.cached_property
    def graph(self) -> Graph:
        """The graph for these sizes, after all passes."""
        with stage(PASSES_STAGE):
            graph = self._make()
            PASSES(graph)
        return graph


class ShapeStrategy(Protocol):
    """One way in which a program serves sizes that it was not compiled for."""

    def find(self, request: Request) -> Compiled | None:
        """Returns what runs calls of these sizes; None: this strategy has nothing for them."""
        ...

"""Runs sequences of passes, and checks the normal form's properties between them.

A pass changes a graph in place and says whether it did (`graph.properties`). A `PassSequence` is
refused when it is made if a pass would run on a graph that does not have what the pass requires.
With `DYNAMO_BACKENDS_CHECK=1` every pass that changed the graph is followed by the checks of all
properties that hold at that point; the tests run this way.
"""

from collections.abc import Callable, Iterable
from contextvars import ContextVar

from dynamo_backends.graph.checker import check
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.properties import Pass, Property
from dynamo_backends.interface.errors import checks_enabled

unchecked = ContextVar("unchecked", default=False)
"""See `check_if_enabled`."""


class PassSequence:
    """An ordered list of passes; checks that each one's required properties hold.

    Args:
        passes: The passes.
        given: What holds before the first.

    Raises:
        ValueError: A pass requires what nothing before it ensures.
    """

    def __init__(self, passes: Iterable[Pass], given: frozenset[Property]):
        self.passes = tuple(passes)
        self.given = given
        holds = given
        for each in self.passes:
            missing = each.requires - holds
            if missing:
                names = ", ".join(sorted(p.name for p in missing))
                raise ValueError(f"no pass before {each.name!r} ensures {names}")
            holds |= each.ensures
        self.ensures = holds

    def __call__(
        self, graph: Graph, after: Callable[[Pass, Graph, bool], None] | None = None
    ) -> bool:
        """Runs the passes in order on a graph.

        Args:
            graph: Changed in place.
            after: Called after each pass with the pass, the graph, and whether it changed.

        Returns:
            Whether any pass changed the graph.

        Raises:
            NormalFormError: Under `DYNAMO_BACKENDS_CHECK=1`, if a pass left a graph without a
                property that should hold.
        """
        holds, changed = self.given, False
        check_if_enabled(graph, holds, "before the first pass")
        for each in self.passes:
            try:
                changed_here = each.run(graph)
            except Exception as error:
                error.add_note(f"in the pass {each.name!r}")
                raise
            changed |= changed_here
            holds |= each.ensures
            asked = holds if changed_here else each.ensures
            check_if_enabled(graph, asked, f"after the pass {each.name!r}")
            if after is not None:
                after(each, graph, changed_here)
        if changed:
            graph.module.recompile()
        return changed


def check_if_enabled(graph: Graph, properties: frozenset[Property], when: str) -> None:
    """Checks a graph's properties if `DYNAMO_BACKENDS_CHECK=1`; raises `NormalFormError`.

    Checking runs operators on fake tensors, whose mode other threads may use at the same time. So
    graphs are not checked in threads in which `unchecked` is true.
    """
    if checks_enabled() and not unchecked.get():
        check(graph, properties, when)

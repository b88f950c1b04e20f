"""Passes: what each requires of a graph and ensures, and the order in which they run.

A pass changes a graph in place and says whether it did. What it requires and ensures are
properties (`Property`), and each property has a check in `graph.checker`. A `PassSequence` is
refused when it is made if a pass would run on a graph that does not have what the pass requires.
With `DYNAMO_BACKENDS_CHECK=1` every pass that changed the graph is followed by the checks of all
properties that hold at that point; the tests run this way.
"""

import enum
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dynamo_backends.graph.graph import Graph


class Property(enum.Enum):
    """What can be said of a graph. The value is the meaning, in words."""

    ORDERED = "placeholders, calls and one output, in topological order, with unique names"
    FUNCTIONAL = "no call writes to memory that another node can see"
    DIALECT = "every call is of the dialect"
    ROLES = "every placeholder has a role; tensor constants are placeholders, each only once"
    TYPED = "`meta['val']` of every node is what fake tensors give when the call is executed"
    LIVE = "every call is used, except those that draw random numbers"
    CANONICAL = "every call has the one spelling of its meaning"
    STATIC = "all sizes are integers, except those that depend on data"
    DRAWS_APART = "random numbers are drawn by calls that look at shapes and not at data"
    OUTPUTS_APART = "outputs that share memory are views, to be made by torch, of one of them"


NORMAL_FORM = frozenset(
    {
        Property.ORDERED,
        Property.FUNCTIONAL,
        Property.DIALECT,
        Property.ROLES,
        Property.TYPED,
        Property.LIVE,
    }
)


@dataclass(frozen=True)
class Stage:
    """One step on the way of a graph.

    Attributes:
        name: A verb.
        summary: What it does, in one line.
        requires: What must hold before.
        ensures: What holds after it. What held before still does.
    """

    name: str
    summary: str
    requires: frozenset[Property]
    ensures: frozenset[Property]


@dataclass(frozen=True)
class Pass(Stage):
    """A stage that changes a graph in normal form in place.

    Attributes:
        run: Changes the graph; returns whether it did. It need not call `recompile`.
    """

    run: Callable[[Graph], bool]


class PassSequence:
    """Passes in the order in which they run.

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
                raise ValueError(f"nothing before the pass {each.name!r} ensures {names}")
            holds |= each.ensures
        self.ensures = holds

    def __call__(
        self, graph: Graph, after: Callable[[Pass, Graph, bool], None] | None = None
    ) -> bool:
        """Runs the passes.

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


def checks_enabled() -> bool:
    """Whether graphs are checked after every pass: `DYNAMO_BACKENDS_CHECK` is set and not 0."""
    return os.environ.get("DYNAMO_BACKENDS_CHECK", "0") not in ("", "0")


def check_if_enabled(graph: Graph, properties: frozenset[Property], when: str) -> None:
    """Checks a graph (see `checker.check`) if `checks_enabled()`."""
    if checks_enabled():
        from dynamo_backends.graph.checker import check

        check(graph, properties, when)

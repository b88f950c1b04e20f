"""Defines properties of graphs (`Property`), which passes require and ensure.

Each property has a check in `graph.checker`.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass

from dynamo_backends.graph.graph import Graph


class Property(enum.Enum):
    """A property of a graph. The value is its meaning, in words."""

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

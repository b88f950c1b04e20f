"""Defines properties of graphs (`Property`), which passes require and ensure.

Each property has a check in `graph.checker`.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass

from dynamo_backends.graph.graph import Graph


class Property(enum.Enum):
    """An invariant of a graph that passes require and ensure; the value says it in words."""

    ORDERED = "placeholders, calls and one output, in topological order, with unique names"
    FUNCTIONAL = "no call mutates a tensor that another node can observe"
    DIALECT = "every call targets a supported operator"
    ROLES = "every placeholder has a role; each tensor constant is one placeholder"
    TYPED = "`meta['val']` of every node equals the result of the call on fake tensors"
    LIVE = "every call is used, except those that draw random numbers"
    CANONICAL = "every call has the canonical form"
    STATIC = "all sizes are integers, except data-dependent ones"
    DRAWS_APART = "random operators depend on shapes only, not on tensor values"
    OUTPUTS_APART = "outputs that share storage are views of one output, created by torch"


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
    """One step from captured graph to normal form: what it requires and what it ensures.

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
    """A stage that rewrites a graph in normal form in place; `run` returns if it changed.

    Attributes:
        run: Changes the graph; returns whether it did. It need not call `recompile`.
    """

    run: Callable[[Graph], bool]

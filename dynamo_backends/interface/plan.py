"""Defines plans: for each call of a graph whether it runs on the backend or in eager."""

import logging
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import fx

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.interface.errors import brief_error, must_propagate

if TYPE_CHECKING:
    from dynamo_backends.graph.graph import Graph

log = logging.getLogger("dynamo_backends")

NOT_ATEN = "it is not an ATen operator"


@dataclass(frozen=True)
class Support:
    """Whether a backend accepts one ATen call, and if not, why.

    Attributes:
        yes: Whether the backend takes the call.
        reason: Why it does not.
        decomposed: Whether it takes the call once torch's rules have decomposed it.
    """

    yes: bool
    reason: str = ""
    decomposed: bool = False

    def __bool__(self) -> bool:
        """Returns whether the call is supported."""
        return self.yes


SUPPORTED = Support(True)


@dataclass(frozen=True)
class Plan:
    """Names calls that run in eager or are decomposed; all others go to the backend.

    What picks one of several results of a call goes with the call.

    Attributes:
        eager: Why calls are left to eager, by their names.
        decomposed: Names of calls that are decomposed by torch's rules before a graph is compiled.
    """

    eager: Mapping[str, str] = field(default_factory=dict)
    decomposed: Collection[str] = frozenset()


def plan_per_call(graph: "Graph", answer: Callable[[fx.Node], Support], who: str) -> Plan:
    """Makes a plan by asking about each call; calls whose query raises run in eager.

    Args:
        graph: The graph.
        answer: Whether an ATen call is taken.
        who: Name of the backend that answers, for reasons.
    """
    eager: dict[str, str] = {}
    decomposed: set[str] = set()
    for node in graph.calls:
        if node.target is operator.getitem:
            continue
        if not isinstance(node.target, OpOverload):
            eager[node.name] = NOT_ATEN
            continue
        try:
            support = answer(node)
        except Exception as error:
            eager[node.name] = support_failure_reason(error, who)
            continue
        if not support:
            eager[node.name] = support.reason
        elif support.decomposed:
            decomposed.add(node.name)
    return Plan(eager, decomposed)


def support_failure_reason(error: Exception, who: str) -> str:
    """Describes a failed support query as a reason; reraises errors for the user.

    Args:
        error: What it raised.
        who: Its name.

    Raises:
        Exception: The error itself, if it is meant for others (see `must_propagate`).
    """
    if must_propagate(error):
        raise error
    log.debug("asking %s failed", who, exc_info=error)
    return f"querying {who} for supported operators failed ({brief_error(error)})"

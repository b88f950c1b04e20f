"""All processes decide together who runs a graph with collectives: XLA on all of them, or torch.

Torch's collectives and XLA's do not meet, so that a process that took another way than the others
would wait for them in vain.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from dynamo_backends.graph.fingerprint import fingerprint
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.partition import extract
from dynamo_backends.interface.errors import CompileError, brief_error
from dynamo_backends.interface.plan import Plan
from dynamo_backends.runtime.ranks.peers import told_apart
from dynamo_backends.runtime.ranks.ranks import Ranks, this_job
from dynamo_backends.xla.lowering.collectives import is_collective, is_wait

PATIENCE = 300.0
"""Seconds that who compiles a graph with collectives waits for the others to compile it, too."""


@dataclass(frozen=True)
class Offer:
    """What a process says of its graph.

    Attributes:
        graph: Its fingerprint.
        exchanged: What its collectives exchange, in order.
        is_chain: Whether each of these needs the result of the one before, and XLA takes all calls,
            so that no other order is possible.
    """

    graph: str
    exchanged: tuple[str, ...]
    is_chain: bool


def planned_together(graph: Graph, plan: Plan) -> Plan:
    """A plan on which all processes agree: collectives are left to torch if their graphs differ.

    Args:
        graph: What is planned.
        plan: This process's own.

    Raises:
        RankError: Another process has ended, or compiles no graph with collectives.
    """
    calls = [n for n in graph.calls if is_collective(n) and n.name not in plan.eager]
    if not calls:
        return plan
    ranks = this_job()
    computed = extract(graph, graph.calls, on_backend=True).graph  # without inputs of no use
    is_chain = not plan.eager and _is_chain(calls)
    offer = Offer(fingerprint(computed), tuple(map(_exchanged, calls)), is_chain)
    offers = ranks.gathered("compiles a graph with collectives", offer, PATIENCE)
    reason = why_apart(offers)
    if reason is None:
        return plan
    distributed = [n for n in graph.calls if is_collective(n) or is_wait(n)]
    left = {n.name: reason for n in distributed if n.name not in plan.eager}
    return replace(plan, eager={**plan.eager, **left})


def why_apart(offers: Sequence[Offer]) -> str | None:
    """Why programs of XLA's cannot exchange what the processes' graphs do; None: they can."""
    first = offers[0]
    for rank, other in enumerate(offers):
        if other.graph == first.graph:
            continue
        if other.exchanged != first.exchanged:
            pairs = zip(first.exchanged, other.exchanged, strict=False)
            pair = next((p for p in pairs if p[0] != p[1]), None) or (
                f"exchanges {len(first.exchanged)} times",
                f"exchanges {len(other.exchanged)} times",
            )
            return f"the ranks' graphs differ: {told_apart({0: pair[0], rank: pair[1]})}"
        if not (first.is_chain and other.is_chain):
            return (
                f"the graphs of rank 0 and rank {rank} differ, so that XLA may exchange in another "
                "order"
            )
    return None


def _exchanged(node: fx.Node) -> str:
    value = node.args[0].meta["val"]  # type: ignore[union-attr]
    return f"calls {node.target} with {value.dtype}{list(value.shape)} {list(node.args[1:])}"


def _is_chain(calls: Sequence[fx.Node]) -> bool:
    """Returns whether each call needs, on some way, the result of the one before."""
    for before, call in itertools.pairwise(calls):
        reached: set[fx.Node] = {before}
        pending = [before]
        while pending:
            for user in pending.pop().users:
                if user not in reached:
                    reached.add(user)
                    pending.append(user)
        if call not in reached:
            return False
    return True


def compiled_together(ranks: Ranks, what: str, outcome: Exception | None) -> None:
    """Raises on all processes if compiling failed on one of them.

    Args:
        ranks: All processes.
        what: Is compiled; the same on all.
        outcome: What was raised on this one.

    Raises:
        Exception: What was raised on this one.
        CompileError: Another one failed.
        RankError: Another one has ended, or compiles something else.
    """
    found = ranks.gathered(what, "" if outcome is None else brief_error(outcome), PATIENCE)
    if outcome is not None:
        raise outcome
    for rank, failure in enumerate(found):
        if failure:
            raise CompileError(f"rank {rank} cannot compile it: {failure}")

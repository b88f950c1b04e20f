"""The candidate that was chosen for a graph, and its way back to eager."""

import os
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from dynamo_backends.autotune.candidates import EAGER
from dynamo_backends.autotune.decisions import Decisions
from dynamo_backends.interface.report import GraphReport, Region
from dynamo_backends.runtime.eager_switch import EagerSwitch
from dynamo_backends.runtime.profiled import graph_name, profiled_as
from dynamo_backends.tuning.counts import COUNTS


def switch_of_chosen(
    eager: Callable[..., Any],
    reports: Sequence[GraphReport],
    region: Region,
    failure: str,
    key: str | None,
) -> EagerSwitch:
    """The way back from what autotune had chosen, whose decision on disk, if any, is dropped."""
    process = os.getpid()

    def forget() -> None:
        COUNTS.add(replaced=1)
        for report in reports:
            report.chosen = EAGER
            if report.tuning:
                report.tuning = f"gave up ({failure})"
        if key is not None and os.getpid() == process:  # a vendor may fail in a forked child alone
            Decisions().drop(key)

    return EagerSwitch(eager, reports, region, failure=failure, on_switch=forget)


class Chosen:
    """Runs a graph with a candidate, until that fails; from then on, in eager.

    Args:
        name: Of the candidate.
        compiled: The graph, compiled by it.
        eager: The graph as Dynamo captured it.
        mutated: Positions of the inputs that the graph writes to.
        reports: Where the candidate says that its compiled code gave up, if it reports at all.
        key: Of the decision on disk, which is dropped when the candidate fails.
    """

    def __init__(
        self,
        name: str,
        compiled: Callable[..., Any],
        eager: Callable[..., Any],
        mutated: Sequence[int],
        reports: Sequence[GraphReport],
        key: str | None,
    ):
        self.name = name
        self._compiled = compiled
        self._profiled_as = graph_name(reports[0]) if reports else name
        self._mutated = tuple(mutated)
        self._gave_up = tuple(r.events for r in reports)
        failure = f"{name}, which autotune had chosen, failed"
        self._switch = switch_of_chosen(eager, reports, "graph", failure, key)

    def __call__(self, *args: Any) -> Any:
        """Runs the graph.

        Raises:
            Exception: What eager raises; or what the candidate raised after it wrote to an input.
        """
        written = [_version(args[i]) for i in self._mutated]
        try:
            with profiled_as(self._profiled_as):
                results = self._compiled(*args)
        except Exception as error:
            if written != [_version(args[i]) for i in self._mutated]:
                raise  # eager would start from inputs that are half changed
            results = self._switch.instead(error, *args)
            self._compiled, self._gave_up = self._switch.eager, ()
            return results
        for events in self._gave_up:
            if events:
                self._switch.failed(events[-1].reason)
                self._compiled, self._gave_up = self._switch.eager, ()
                break
        return results


def _version(value: Any) -> int | None:
    if not isinstance(value, Tensor) or value.is_inference():
        return None
    return value._version

"""The candidate that was chosen for a graph, and its way back to eager."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from dynamo_backends.autotune.decisions import Decisions
from dynamo_backends.errors import brief_error
from dynamo_backends.report import GraphReport
from dynamo_backends.tuning.counts import COUNTS

log = logging.getLogger("dynamo_backends")


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
        self._eager = eager
        self._mutated = tuple(mutated)
        self._gave_up = tuple(r.runtime_fallbacks for r in reports)
        self._reports = reports
        self._key = key

    def __call__(self, *args: Any) -> Any:
        """Runs the graph.

        Raises:
            Exception: What eager raises; or what the candidate raised after it wrote to an input.
        """
        written = [_version(args[i]) for i in self._mutated]
        try:
            results = self._compiled(*args)
        except Exception as error:
            if written != [_version(args[i]) for i in self._mutated]:
                raise  # eager would start from inputs that are half changed
            results = self._eager(*args)  # raises too where the inputs are to blame
            if self._compiled is not self._eager:
                self._replace(brief_error(error))
            return results
        for reasons in self._gave_up:
            if reasons:
                self._replace(reasons[-1])
                break
        return results

    def _replace(self, reason: str) -> None:
        COUNTS.replaced += 1
        self._compiled = self._eager
        self._gave_up = ()
        text = f"{self.name}, which autotune had chosen, failed: {reason}"
        log.warning("%s; the graph runs in eager from now on", text)
        for report in self._reports:
            if text not in report.runtime_fallbacks:
                report.runtime_fallbacks.append(text)
            report.chosen = "eager"
        if self._key is not None:
            Decisions().drop(self._key)


def _version(value: Any) -> int | None:
    if not isinstance(value, Tensor) or value.is_inference():
        return None
    return value._version

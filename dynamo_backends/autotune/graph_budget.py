"""The share of the budget of a process that one graph may spend."""

import logging
from collections.abc import Collection, Sequence

from dynamo_backends.workers.budget import Budget

log = logging.getLogger("dynamo_backends")

EARLY = 0.5
"""Part of the budget until which a graph's most promising candidate is tried, whatever it takes."""

_MEASURING = 2.0  # times as long as the reference: what verifying and measuring a candidate takes

_SHORT_S, _LONG_S = 8.0, 30.0
_LONG_CALL_S = 0.02
_DERIVATIVE = 3.0  # times as long: each candidate compiles a forward and a backward graph
_USUAL_S = 120.0  # see `AutotuneOptions.budget_s`


def graph_limit_s(call_s: float, total_s: float, is_differentiated: bool = False) -> float:
    """Returns the seconds of the total budget that one graph may spend.

    A graph of short calls has little to gain, and should not take minutes; one of long calls should
    leave enough for the next model: 8 s to 30 s of the usual budget, three times as much for graphs
    that are differentiated, and more where the user gives more.

    Args:
        call_s: Seconds of a call in eager.
        total_s: The budget.
        is_differentiated: Whether gradients are computed in the call as well.
    """
    part = min(1.0, call_s / _LONG_CALL_S)
    seconds = _SHORT_S + (_LONG_S - _SHORT_S) * part
    return seconds * (_DERIVATIVE if is_differentiated else 1.0) * max(1.0, total_s / _USUAL_S)


class GraphBudget:
    """The part of the process's tuning budget that one graph may spend.

    Args:
        budget: Budget of the process.
        part: Of what is left that is for this graph; the rest is for the one that follows from it.
        in_any_case: Candidates that are tried whatever is left, until one of the graph is right.
    """

    def __init__(self, budget: Budget, part: float = 1.0, in_any_case: Collection[str] = ()):
        left = budget.left_s
        self.budget = budget
        self._is_part = part < 1
        self._ends_s = budget.spent_s + left * part
        self._has_one_free = budget.owes or left > (1 - EARLY) * budget.total_s
        self._in_any_case = frozenset(in_any_case)
        self._measuring_s = 0.0

    @property
    def left_s(self) -> float:
        """Returns the seconds left for this graph."""
        return max(0.0, min(self.budget.left_s, self._ends_s - self.budget.spent_s))

    @property
    def compile_time_left_s(self) -> float:
        """Returns the seconds left for compiling; verifying and measuring are deducted."""
        return max(0.0, self.left_s - self._measuring_s)

    def allows_candidate(self, compile_s: float, name: str) -> bool:
        """Returns whether a candidate's expected compile time fits into the budget.

        Args:
            compile_s: Seconds that it is expected to compile for.
            name: Its name.
        """
        is_free = self._has_one_free or name in self._in_any_case
        return is_free or compile_s <= self.compile_time_left_s

    def note_reference_time(self, seconds: float) -> None:
        """Notes the seconds of the eager references, from which measuring is estimated."""
        self._measuring_s = _MEASURING * seconds

    def note_compiled(self, is_right: bool) -> None:
        """Notes that a candidate was compiled; later ones must fit into the budget.

        Args:
            is_right: Whether it takes part in the race.
        """
        self._has_one_free = False
        if is_right:
            self._in_any_case = frozenset()
        self.budget.finished()

    def why_refused(self, compile_s: float) -> str:
        """Returns, as text for the report, why the budget does not suffice for a candidate."""
        budget = f"budget of {self.budget.total_s:g} s"
        if self.budget.share_s:
            budget = f"{self.budget.share_s:.0f} s that the {budget} allows for this graph"
        if not self.budget.left_s:
            return f"not tried: the {budget} {'are' if self.budget.share_s else 'is'} spent"
        expected = compile_s + self._measuring_s
        return (
            f"not tried: it needs about {expected:.0f} s, more than what is left of the "
            f"{budget}{' after reserving time for the backward graph' * self._is_part}"
        )

    def warn_of_untried(self, cut: Sequence[str], what: str) -> None:
        """Logs once which candidates were not tried for lack of time.

        It is no more than information where the graph had its share.

        Args:
            cut: Their names.
            what: The graph in words.
        """
        if cut and self.budget.share_s:
            log.info(
                "autotune: %s: %s not tried within the %.0f s for this graph. To try them, raise "
                "options={'budget_s': ...} or name them in options={'candidates': ...}.",
                what,
                ", ".join(cut),
                self.budget.share_s,
            )
        elif cut and self.budget.tell():
            log.warning(
                "autotune's budget of %g s, which all graphs of this process share, is exhausted: "
                "%s not tried (%s). To try them, raise options={'budget_s': ...}.",
                self.budget.total_s,
                ", ".join(cut),
                what,
            )

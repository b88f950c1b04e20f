"""The share of the budget of a process that one graph may spend."""

import logging
from collections.abc import Collection, Sequence

from dynamo_backends.workers.budget import Budget

log = logging.getLogger("dynamo_backends")

EARLY = 0.5
"""Part of the budget until which a graph's most promising candidate is tried, whatever it takes."""

_MEASURING = 2.0  # times as long as the reference: what verifying and measuring a candidate takes


class GraphBudget:
    """The time that tuning may spend on one graph; made when its tuning begins.

    Args:
        budget: Budget of the process.
        part: Of what is left that is for this graph; the rest is for the one that follows from it.
        in_any_case: Candidates that are tried whatever is left, until one of the graph is right.
    """

    def __init__(self, budget: Budget, part: float = 1.0, in_any_case: Collection[str] = ()):
        left = budget.left_s
        self.budget = budget
        self._reserved_s = left * (1 - part)
        self._has_one_free = budget.owes or left > (1 - EARLY) * budget.total_s
        self._in_any_case = frozenset(in_any_case)
        self._measuring_s = 0.0

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return max(0.0, self.budget.left_s - self._reserved_s)

    @property
    def compile_s(self) -> float:
        """Seconds that a candidate may be expected to compile for."""
        return max(0.0, self.left_s - self._measuring_s)

    def suffices(self, compile_s: float, name: str) -> bool:
        """Returns whether a candidate is tried.

        Args:
            compile_s: Seconds that it is expected to compile for.
            name: Its name.
        """
        is_free = self._has_one_free or name in self._in_any_case
        return is_free or compile_s <= self.compile_s

    def note_reference(self, seconds: float) -> None:
        """Notes what eager took, also in float64 and on other inputs."""
        self._measuring_s = _MEASURING * seconds

    def note_finished(self, is_right: bool) -> None:
        """Notes that a candidate of the graph was compiled; others have to fit in.

        Args:
            is_right: Whether it takes part in the race.
        """
        self._has_one_free = False
        if is_right:
            self._in_any_case = frozenset()
        self.budget.finished()

    def refusal(self, compile_s: float) -> str:
        """Returns why a candidate is not tried for which they do not suffice, in words."""
        total = self.budget.total_s
        if not self.budget.left_s:
            return f"not tried: the budget of {total:g} s is spent"
        expected = compile_s + self._measuring_s
        return (
            f"not tried: about {expected:.0f} s for it are more than what is left of the "
            f"budget of {total:g} s{' beside that of the backward graph' * bool(self._reserved_s)}"
        )

    def warn(self, cut: Sequence[str], what: str) -> None:
        """Warns of candidates that are not tried: once, since the budget is the same for all.

        Args:
            cut: Their names.
            what: The graph in words.
        """
        if cut and self.budget.tell():
            log.warning(
                "autotune's budget of %g s, which is for all graphs of this process, does not "
                "last: %s not tried (%s). With more time, options={'budget_s': ...}, they are",
                self.budget.total_s,
                ", ".join(cut),
                what,
            )

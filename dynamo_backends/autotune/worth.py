"""Who is not worth a compilation, by what is predicted, and who is after all."""

from collections.abc import Collection

from dynamo_backends.autotune.cost import CostModel
from dynamo_backends.autotune.options import AutotuneOptions


class Worth:
    """Of the candidates of one tuning session.

    What is expected may be wrong. So who was left out because the best one was expected to be
    faster than it turned out to be has its turn after the first measurement.

    Args:
        model: What to expect of whom.
        options: Of autotune. All candidates that they name are worth it, and all where memory is
            the objective.
    """

    def __init__(self, model: CostModel, options: AutotuneOptions):
        self._model = model
        self._all = bool(options.candidates) or options.objective == "memory"
        self._left_out: dict[str, float] = {}
        self._measured = 0.0

    def refusal(self, name: str, right: Collection[str]) -> str:
        """Returns why a candidate is not tried, in words; empty: it is.

        Args:
            name: Of the candidate.
            right: Names of those that were proven right.
        """
        self._left_out.pop(name, None)
        if self._all or not right:
            return ""
        best = self._measured or max(self._model.predict(other).speedup for other in right)
        at_most = self._model.predict(name).at_most
        if at_most >= best:
            return ""
        self._left_out[name] = at_most
        return (
            f"not tried: it is expected to be at most {at_most:.2f} times as fast as eager, "
            f"{'the best one is' if self._measured else 'another one'} {best:.2f} times"
        )

    def measured(self, speedup: float) -> list[str]:
        """Takes note of the best speedup; returns who was left out and could exceed it.

        Args:
            speedup: Over eager, of the fastest candidate that is right, at least 1.
        """
        self._measured = speedup
        return [name for name, at_most in self._left_out.items() if at_most > speedup]

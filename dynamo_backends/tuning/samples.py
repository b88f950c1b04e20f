"""Times of one candidate in a race, and which of them count."""

from dynamo_backends.tuning.contention import is_harmless
from dynamo_backends.tuning.statistics import Ratio, separate_speedup, speedup

ENOUGH = 5
"""So many undisturbed samples tell how long something takes."""

_RESAMPLES = 400


class Samples:
    """Seconds per call, one of each round.

    Attributes:
        times: All of them.
        quiet: Which of them were not disturbed by other processes.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self.quiet: list[bool] = []

    def add(self, per_call: float, seconds: float, preemptions: int) -> None:
        """Takes a sample up.

        Args:
            per_call: Seconds of one call.
            seconds: Of the whole sample.
            preemptions: While it was taken.
        """
        self.times.append(per_call)
        self.quiet.append(is_harmless(preemptions, seconds))

    @property
    def enough(self) -> bool:
        """Whether there are as many undisturbed samples as are needed."""
        return sum(self.quiet) >= ENOUGH

    def counted(self) -> list[float]:
        """Undisturbed samples; all of them if these are too few."""
        return self.undisturbed() if self.enough else list(self.times)

    def undisturbed(self) -> list[float]:
        """Those that nobody disturbed."""
        return [t for t, quiet in zip(self.times, self.quiet, strict=True) if quiet]

    def over(self, other: "Samples", least: int) -> Ratio:
        """This one's time over another's.

        In the rounds in which both ran undisturbed, if these are as many as `least`; else in the
        undisturbed samples of each, if there are enough; else in all rounds in which both ran.
        """
        rounds = list(zip(self.times, other.times, self.quiet, other.quiet, strict=False))
        both = [(a, b) for a, b, *quiet in rounds if all(quiet)]
        if len(both) < least and len(both) < len(rounds):
            if self.enough and other.enough:
                return separate_speedup(self.undisturbed(), other.undisturbed(), _RESAMPLES)
            both = [(a, b) for a, b, *_ in rounds]
        first, second = zip(*both, strict=True)
        return speedup(first, second, _RESAMPLES)

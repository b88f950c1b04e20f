"""A machine on which another process takes processors, as it is planted."""

from dynamo_backends.workers.contention import System


class PlantedSystem(System):
    """Counts what it is told.

    Attributes:
        wall: Seconds that have passed.
        own: Seconds of processors of this process.
        others: Seconds of processors of all other processes; None: the system does not say.
        left: How often threads had to leave a processor.
    """

    unsure_s = 0.0

    def __init__(self) -> None:
        self.wall = self.own = 0.0
        self.others: float | None = 0.0
        self.left = 0

    def passes(self, seconds: float, others: float = 0.0, preempted: bool = False) -> None:
        """This process computes on a processor while others have some."""
        self.wall += seconds
        self.own += seconds
        if self.others is not None:
            self.others += others * seconds
        self.left += 3 * preempted

    def wall_s(self) -> float:
        """See `System.wall_s`."""
        return self.wall

    def own_s(self) -> float:
        """See `System.own_s`."""
        return self.own

    def busy_s(self) -> float | None:
        """See `System.busy_s`."""
        return None if self.others is None else self.others + self.own

    def preemptions(self) -> int:
        """See `System.preemptions`."""
        return self.left

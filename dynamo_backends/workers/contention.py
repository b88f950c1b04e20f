"""Detects whether other processes used the processors during a measurement.

A thread that is preempted waits for milliseconds, and all threads of its call wait for it; those
that spin meanwhile take the rest. On two cores of which another process has one, a product of
1.3 ms takes 16 in the median. The system counts preemptions for each process, so a sample in which
there were none is as good as on a quiet machine, and one in which there were is no measurement.
"""

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from dynamo_backends.workers.stopped_time import stopped_s

_SPARE = 0.25
"""Processors that others may take before a machine counts as busy: the system's own work."""

_IDLE = 0.05
"""Others that take less of the processors cannot have disturbed what was measured meanwhile."""

_IDLE_S = 0.15
"""Seconds until the system, which counts in hundredths, shows that others are idle."""

_HARMLESS_S = 0.0125
"""One preemption in so much time is the system's own work, which takes microseconds. An idle
machine has 30 a second; one of whose two cores another process has, more than 100."""

_MOST_PREEMPTED = 0.25
_MOST_SCATTERED = 0.25


class System:
    """The system's counters, each of which grows from the start of the process or machine.

    Attributes:
        unsure_s: By how much a difference of what `busy_s` says may be too large.
    """

    unsure_s = 0.02  # a tick at both ends

    def wall_s(self) -> float:
        """Returns the elapsed seconds of wall time."""
        return time.perf_counter()

    def stopped_s(self) -> float:
        """Seconds of them in which this process was stopped."""
        return stopped_s()

    def own_s(self) -> float:
        """Seconds of processors that this process has used; not its children, who compete."""
        return time.process_time()

    def busy_s(self) -> float | None:
        """Seconds in which the processors of this process were in use; None if nobody says."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
            lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
            times = [line.split()[1:9] for line in lines if line.split(" ", 1)[0] in allowed]
            ticks = sum(sum(map(int, t)) - int(t[3]) - int(t[4]) for t in times)
            return ticks / os.sysconf("SC_CLK_TCK")
        return None

    def preemptions(self) -> int:
        """Returns how often threads of this process were preempted; 0 where that is not counted."""
        try:
            from resource import RUSAGE_SELF, getrusage
        except ImportError:  # Windows
            return 0
        return getrusage(RUSAGE_SELF).ru_nivcsw


@dataclass(frozen=True)
class Contention:
    """The load by other processes while candidates were measured.

    Attributes:
        of_others: Processors that other processes had, in the mean.
        free: Processors that this process may use and whose threads do not need.
        preempted: Which part of the samples was disturbed, 0 to 1.
        scattered: Interquartile range of the times that count, over their median, of the candidate
            for which it is largest.
        idle: Others are known to have had no processor: who interrupted was the system itself, and
            times differ as they do on this machine when it is quiet.
    """

    of_others: float = 0.0
    free: int = 0
    preempted: float = 0.0
    scattered: float = 0.0
    idle: bool = False

    @property
    def disturbed(self) -> bool:
        """Returns whether the outcome may be another one on a quiet machine."""
        busy = self.of_others > self.free + _SPARE
        interrupted = self.preempted > _MOST_PREEMPTED or not self.even
        return busy or (interrupted and not self.idle)

    @property
    def even(self) -> bool:
        """Returns whether the undisturbed times agree."""
        return self.scattered <= _MOST_SCATTERED

    def __str__(self) -> str:
        """Returns the load in words."""
        return (
            f"other processes used {self.of_others:.1f} CPUs, {self.preempted:.0%} of the samples "
            f"were interrupted, times differed by {self.scattered:.0%}"
        )


class Watch:
    """Others, from now on.

    Args:
        system: Where numbers come from.
    """

    def __init__(self, system: System):
        self._system = system
        self._start = system.wall_s(), system.own_s(), system.busy_s()
        self._stopped_s = system.stopped_s()

    def of_others(self) -> float:
        """Processors that other processes have had since, in the mean; 0 where nobody says.

        Nor does anybody where this process was stopped meanwhile, for the sake of others.
        """
        seconds = self._system.wall_s() - self._start[0]
        others = self._of_others()
        return max(0.0, others - self._system.unsure_s / seconds) if others else 0.0

    def idle(self) -> bool:
        """Returns whether others are known to have had no processor since."""
        others = self._of_others()
        long = self._system.wall_s() - self._start[0] >= _IDLE_S
        return long and others is not None and -_IDLE < others < _IDLE

    def _of_others(self) -> float | None:
        """Processors, less than 0 where the system does not count all of this process."""
        wall, own, busy = self._start
        if self._system.stopped_s() > self._stopped_s:
            return None
        now = self._system.busy_s()
        seconds = self._system.wall_s() - wall
        if busy is None or now is None or seconds <= 0:
            return None
        return (now - busy - (self._system.own_s() - own)) / seconds


def is_undisturbed(preemptions: int, seconds: float) -> bool:
    """Returns whether a timing sample had few enough preemptions to count.

    Args:
        preemptions: Preemptions of this process while it was taken.
        seconds: That it took.
    """
    return preemptions <= int(seconds / _HARMLESS_S)


def processors() -> int:
    """Returns how many processors this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def free_processors() -> int:
    """Returns how many processors torch's threads leave to others."""
    return max(0, processors() - torch.get_num_threads())

"""Counts how long a process has been stopped, in memory shared with its parent.

What is timed there (races of candidates) must not count the seconds of others' calls.
"""

import contextlib
import mmap
import struct
import sys
import tempfile
import time
from collections.abc import Iterator

_NUMBER = struct.Struct("d")
_OPTION = "--stopped-time="


class StoppedTime:
    """A number of seconds that one process writes and another one reads.

    Args:
        descriptor: Of a file that both have open; it may be closed afterwards. -1: memory of this
            process alone.
    """

    def __init__(self, descriptor: int = -1):
        self._memory = mmap.mmap(descriptor, _NUMBER.size)

    @property
    def seconds(self) -> float:
        """Returns the seconds for which the process was stopped, in all."""
        (seconds,) = _NUMBER.unpack_from(self._memory)
        return float(seconds)

    def add(self, seconds: float) -> None:
        """Counts a stop that is over; the process must not run yet."""
        _NUMBER.pack_into(self._memory, 0, self.seconds + seconds)


@contextlib.contextmanager
def shared_stopped_time() -> Iterator[tuple[StoppedTime, int]]:
    """Context manager: a stopped time and the descriptor that a child inherits."""
    with tempfile.TemporaryFile() as file:
        file.truncate(_NUMBER.size)
        yield StoppedTime(file.fileno()), file.fileno()


def stopped_time_argument(descriptor: int) -> str:
    """Returns the command-line argument by which a child finds its stopped time."""
    return f"{_OPTION}{descriptor}"


_own: StoppedTime | None = None


def follow_stopped_time(arguments: list[str]) -> None:
    """Makes `running_s` exclude the time in which the parent stopped this process.

    Args:
        arguments: Arguments of this process; without a `stopped_time_argument` nobody stops it.
    """
    global _own
    for each in arguments:
        if each.startswith(_OPTION) and sys.platform != "win32":
            _own = StoppedTime(int(each.removeprefix(_OPTION)))


def is_stopped_by_parent() -> bool:
    """Returns whether the parent process stops this one at times."""
    return _own is not None


def stopped_s() -> float:
    """Seconds in which this process was stopped, so that others' calls could run."""
    return _own.seconds if _own is not None else 0.0


def running_s() -> float:
    """Seconds that pass while this process is not stopped, since some point of time."""
    return time.perf_counter() - stopped_s()

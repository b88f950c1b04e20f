"""Programs by the set of sizes that they were found for, and when there are too many sets."""

from collections.abc import Hashable

from dynamo_backends.interface.options import Options
from dynamo_backends.interface.report import GraphReport
from dynamo_backends.pipeline.shapes.strategy import Compiled
from dynamo_backends.runtime.lru import LRU


class ExactPrograms:
    """What runs calls of each set of sizes; a program that serves several is here several times.

    Args:
        options: Of the backend; `max_executables` of the sets are kept.
        report: Of the graph; told when further sets run in eager.
    """

    def __init__(self, options: Options, report: GraphReport):
        self._options = options
        self._report = report
        self._programs: LRU[Hashable, Compiled] = LRU(options.max_executables)
        self._displaced = 0  # programs of one set of sizes that made room for others

    def get(self, key: Hashable) -> Compiled | None:
        """Returns what runs calls of these sizes; None: nothing yet."""
        return self._programs.get(key)

    def put(self, key: Hashable, program: Compiled) -> None:
        """Notes what runs calls of these sizes; what was used least recently makes room."""
        most = self._options.max_executables
        if len(self._programs) >= most and program.served.by == "exact":
            self._displaced += 1
            if self._displaced == most and self.is_churning:
                self._report.note_failure(
                    f"each set of sizes is compiled for itself, and there are more than twice the "
                    f"{most} that are kept (max_executables): others run in eager from now on"
                )
        self._programs.put(key, program)

    def clear(self) -> None:
        """Forgets all programs."""
        self._programs.clear()

    @property
    def is_churning(self) -> bool:
        """Whether there are so many sizes that programs leave before they have paid."""
        too_many = self._displaced >= self._options.max_executables
        return too_many and self._options.fallback == "eager"

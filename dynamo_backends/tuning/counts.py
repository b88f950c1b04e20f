"""What tuning has done in this process, counted."""

from dataclasses import dataclass

from dynamo_backends.interface.counters import Counted


@dataclass
class Counts(Counted):
    """What autotune did in this process.

    Attributes:
        sessions: Graphs for which candidates were compared.
        remembered: Graphs for which a decision was found on disk.
        compiled: Candidates that were compiled, eager not among them.
        verified: Candidates that were compared with eager.
        samples: Timings that were taken.
        replaced: Chosen candidates that failed later and were replaced.
    """

    sessions: int = 0
    remembered: int = 0
    compiled: int = 0
    verified: int = 0
    samples: int = 0
    replaced: int = 0


COUNTS = Counts()

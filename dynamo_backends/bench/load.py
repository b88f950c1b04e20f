"""What else a machine does while something is measured."""

import time
from typing import Any

from dynamo_backends.bench.packages import import_psutil


class Load:
    """While it is entered: how busy other processes keep the processors.

    Attributes:
        of_others: Processor seconds of other processes per second; None where the system does not
            say.
    """

    of_others: float | None = None

    def __enter__(self) -> "Load":
        """Begins."""
        self._start = self._now()
        return self

    def __exit__(self, *_: Any) -> None:
        """Ends, and works it out."""
        wall, busy, own = (b - a for a, b in zip(self._start, self._now(), strict=True))
        if busy > 0 and wall > 0:
            self.of_others = max(0.0, busy - own) / wall

    def _now(self) -> tuple[float, float, float]:
        psutil = import_psutil()
        times = psutil.cpu_times()._asdict()
        idle = times.get("idle", 0.0) + times.get("iowait", 0.0)
        guest = times.get("guest", 0.0) + times.get("guest_nice", 0.0)  # counted in user as well
        mine = psutil.Process().cpu_times()
        return time.perf_counter(), sum(times.values()) - idle - guest, mine.user + mine.system

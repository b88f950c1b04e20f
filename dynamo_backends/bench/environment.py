"""Describes what measurements depend on: versions, devices, other load of the machine."""

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dynamo_backends.bench.packages import import_psutil
from dynamo_backends.interface.errors import OptionError
from dynamo_backends.interface.packages import installed_versions
from dynamo_backends.interface.registry import list_backends, package_versions
from dynamo_backends.runtime.cpu_info import cpu_name
from dynamo_backends.workers.memory import peak_rss_bytes

_PACKAGES = ("torch", "numpy", "torchvision", "transformers", "timm")
"""Besides those of the backends."""


def environment() -> dict[str, Any]:
    """Returns what a measurement depends on: versions, processor, threads, devices."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": cpu_name(),
        "cpus": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": driver_version() or None,
        "versions": installed_versions(_PACKAGES) | package_versions(list_backends()),
    }


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Returns the version of NVIDIA's driver: "unknown" if the file hides it, empty without one."""
    try:  # a line such as "NVRM version: NVIDIA UNIX ... Module  580.65.06  ..."
        words = file.read_text(encoding="utf-8").split()
    except OSError:
        return ""
    numbers = [word for word in words if word[:1].isdigit() and "." in word]
    return numbers[0] if numbers else ("unknown" if words else "")


def threads_in_words(count: int | None) -> str:
    """Such as "1 torch thread"."""
    return f"{count} torch thread" + "s" * (count != 1)


def environment_line() -> str:
    """`environment` in one line, for the head of a table."""
    facts = environment()
    device = facts["cuda"] or facts["processor"]
    torch_and_jax = (f"{n} {v}" for n, v in facts["versions"].items() if n in ("torch", "jax"))
    return (
        f"{device}, {threads_in_words(facts['torch_threads'])}; Python {facts['python']},"
        f" {', '.join(torch_and_jax)}"
    )


DEVICES = ("cpu", "cuda")


def require_torch_device(device: str) -> None:
    """Raises OptionError if torch cannot use the device here.

    Raises:
        OptionError: There is none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise OptionError(
            "--device cuda needs a GPU and a torch build with CUDA; run `dynamo-backends doctor` "
            "to see what is missing."
        )


def synchronize_function(device: str) -> Callable[[], None] | None:
    """Returns the function that waits for a device; None if its calls are synchronous."""
    return torch.cuda.synchronize if device == "cuda" else None


def wait(device: str) -> None:
    """Waits for what was begun on a device."""
    if device == "cuda":
        torch.cuda.synchronize()


def peak_memory_bytes(device: str) -> int:
    """Returns the peak resident memory, or torch's peak allocation on a GPU.

    Memory that a vendor's runtime takes from a GPU by itself is not seen.
    """
    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    return peak_rss_bytes()


class LoadMonitor:
    """Context manager that measures how much CPU other processes use meanwhile.

    Attributes:
        of_others: Processor seconds of other processes per second; None where the system does not
            say.
    """

    of_others: float | None = None

    def __enter__(self) -> "LoadMonitor":
        """Begins to watch the load."""
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

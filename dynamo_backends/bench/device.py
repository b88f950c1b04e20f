"""Where models run that are measured: on the CPU or a GPU."""

from collections.abc import Callable

import torch

from dynamo_backends.interface.errors import OptionError
from dynamo_backends.workers.memory import peak_rss_bytes

DEVICES = ("cpu", "cuda")


def require(device: str) -> None:
    """Checks that there is a device.

    Raises:
        OptionError: There is none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise OptionError(
            "--device cuda needs a GPU and a torch that is built for it; "
            "`dynamo-backends doctor` says what is missing."
        )


def synchronizing(device: str) -> Callable[[], None] | None:
    """Returns what waits for a device; None if calls wait themselves."""
    return torch.cuda.synchronize if device == "cuda" else None


def wait(device: str) -> None:
    """Waits for what was begun on a device."""
    if device == "cuda":
        torch.cuda.synchronize()


def peak(device: str) -> int:
    """Largest memory in bytes so far: resident of the process; on a GPU what torch allocated.

    Memory that a vendor's runtime takes from a GPU by itself is not seen.
    """
    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    return peak_rss_bytes()

"""The platforms that XLA is asked for, by name."""

from collections.abc import Callable
from typing import Any

PLATFORMS = ("cpu", "cuda", "tpu")
"""Those that jax knows."""

OPENERS: dict[str, Callable[[int], Any]] = {}
"""What opens a device of another name, given its index. Tests have one."""


def parts_of(device: str) -> tuple[str, int] | None:
    """Platform and index in the name of a device, such as "tpu:1"; None: it is no such name."""
    platform, colon, index = device.partition(":")
    if platform not in PLATFORMS and platform not in OPENERS:
        return None
    if colon and not index.isdecimal():
        return None
    return platform, int(index or 0)

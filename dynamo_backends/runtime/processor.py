"""The processor, as far as machine code depends on it."""

import contextlib
import functools
import hashlib
import os
import platform
from pathlib import Path


@functools.cache
def processor() -> str:
    """What machine code depends on: architecture and instruction sets, for keys of caches."""
    flags = ""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            flags = next((line for line in file if line.startswith(("flags", "Features"))), "")
    digest = hashlib.sha256(flags.encode()).hexdigest()[:16]
    return f"{platform.machine()} {platform.processor()} {digest}"


@functools.cache
def processor_name() -> str:
    """What the processor is called, for people and for keys of what was measured on it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

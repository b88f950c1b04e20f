"""The processor, as far as machine code depends on it."""

import functools
import hashlib
import os
import platform


@functools.cache
def processor() -> str:
    """What machine code depends on: architecture and instruction sets, for keys of caches."""
    flags = ""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            flags = next((line for line in file if line.startswith(("flags", "Features"))), "")
    digest = hashlib.sha256(flags.encode()).hexdigest()[:16]
    return f"{platform.machine()} {platform.processor()} {digest}"

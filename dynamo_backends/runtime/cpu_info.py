"""Describes the CPU for cache keys, and sets the scheduling of threads."""

import contextlib
import functools
import hashlib
import os
import platform
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

_AVX512 = frozenset({"avx512bw", "avx512dq", "avx512f", "avx512vl"})

_LEVELS: Mapping[str, Collection[str]] = {
    "avx512_core_amx": {*_AVX512, "amx_bf16", "amx_int8", "amx_tile"},
    "avx512_core_fp16": {*_AVX512, "avx512_fp16"},
    "avx512_core_bf16": {*_AVX512, "avx512_bf16"},
    "avx512_core_vnni": {*_AVX512, "avx512_vnni"},
    "avx512_core": _AVX512,
    "avx2_vnni": {"avx2", "avx_vnni", "fma"},
    "avx2": {"avx2", "fma"},
}
"""Levels that libraries choose kernels by, with the flags that Linux gives processors of a level.

Names and order are oneDNN's (page "CPU Dispatcher Control" of its developer guide).
"""


@functools.cache
def cpu_cache_key() -> str:
    """Returns CPU architecture and a hash of its flags, for cache keys."""
    digest = hashlib.sha256(_flags().encode()).hexdigest()[:16]
    return f"{platform.machine()} {platform.processor()} {digest}"


@functools.cache
def cpu_isa_level() -> str:
    """Returns the CPU's oneDNN instruction-set level; empty if unknown."""
    flags = set(_flags().split())
    found = (level for level, needed in _LEVELS.items() if flags.issuperset(needed))
    level = next(found, "")
    return level and f"{platform.machine()} {level}"


def cpu_flags() -> tuple[str, ...]:
    """Returns the CPU flags, sorted; empty if the system does not list them."""
    return tuple(sorted(_flags().partition(":")[2].split()))


def _flags() -> str:
    if not os.path.exists("/proc/cpuinfo"):
        return ""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        return next((line for line in file if line.startswith(("flags", "Features"))), "")


@functools.cache
def cpu_name() -> str:
    """Returns the CPU model name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@functools.cache
def cpu_family() -> str:
    """Returns CPU vendor and family, such as "AuthenticAMD 26"; empty if unknown."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            found.setdefault(name.strip(), value.strip())
    return f"{found.get('vendor_id', '')} {found.get('cpu family', '')}".strip()


@contextlib.contextmanager
def use_batch_scheduling() -> Iterator[None]:
    """Starts threads with Linux's `SCHED_BATCH` policy (context manager).

    Such a thread has its share of the cores, but does not interrupt another when it wakes. That
    serves a thread which is woken by what the computing thread does, and then asks for a lock that
    this one holds, over and over, until it is interrupted in turn: gloo's does when data arrives.
    """
    mine = _policy()
    if mine is None or mine != os.SCHED_OTHER or not _set(os.SCHED_BATCH):
        yield
        return
    try:
        yield
    finally:
        _set(mine)


def _policy() -> int | None:
    try:
        return os.sched_getscheduler(0)  # of the calling thread
    except (AttributeError, OSError):  # not Linux, or not permitted
        return None


def _set(policy: int) -> bool:
    try:
        os.sched_setscheduler(0, policy, os.sched_param(0))
    except OSError:
        return False
    return True

"""Threads that wait for what computes, where the operating system would have them interrupt it."""

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def batch_threads() -> Iterator[None]:
    """Inside: threads that this one starts get Linux's policy for batches (`sched(7)`).

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

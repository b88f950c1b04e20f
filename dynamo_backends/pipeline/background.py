"""Compiles in a background thread that yields to compiled and eager calls.

What it can it has another process do (`compiler_process`). What a vendor does in C++ here runs
beside a call. What is Python here (passes, loading) does not: each operator of a call in eager
gives the interpreter away, and would wait 5 ms for it (`sys.getswitchinterval()`). So the thread
looks, at each call of a Python function, whether calls are running, and sleeps until they have
ended; if there are no pauses between calls, for most of the time.

The thread has the priority of all others. The runtimes' threads are often started while something
is compiled, and would inherit a lower one for all their calls.
"""

import atexit
import contextvars
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dynamo_backends._torch_private import after_backward, is_capturing, tracing_thread_locally
from dynamo_backends.graph.pass_sequence import unchecked
from dynamo_backends.pipeline import compiler_process
from dynamo_backends.workers.queue_thread import Helper, QueueThread, Stopped
from dynamo_backends.workers.turns import turns

_MOST = 64
"""Largest number of waiting compilations; further ones are requested again by the next call."""

_PAUSE, _RUN = 0.008, 0.002
"""Seconds: how long the thread sleeps at a time while calls run, and how long it then works."""

_LONGEST_PAUSE = 1.0
"""Seconds: how long it sleeps at a time where calls leave pauses; a call may never end."""

_LONGEST_BACKWARD_S = 30.0
"""Nobody says that a backward pass has failed, so it counts as over then."""

_CAPTURE_PAUSE = 0.05
"""Seconds: how long it sleeps while Dynamo captures a graph, which is Python, too."""

_LOOK = 0.004
"""Seconds after which it looks whether there is anything left to sleep for."""


@dataclass(frozen=True)
class _Job:
    """Something to be compiled.

    Attributes:
        mark: What it is, with who asked for it.
        owner: Who asked, if it is to be compiled only as long as that is there.
        run: Compiles it; gets the owner, if there is one.
    """

    mark: Hashable
    owner: "weakref.ref[Any] | None"
    run: Callable[..., None]


class _Worker(QueueThread[_Job]):
    """The thread, and what it has to do."""

    name = "dynamo_backends compiler"
    last_s = 10.0  # for what a vendor is compiling

    def __init__(self) -> None:
        super().__init__()
        self.marks: set[Hashable] = set()  # waiting or under way
        self._resumed = 0.0

    @property
    def helper(self) -> Helper:
        return compiler_process.process

    def submit(self, mark: Hashable, job: Callable[..., None], owner: Any) -> bool:
        asked = None if owner is None else weakref.ref(owner, self._forget)
        mark = (asked, mark)
        context = contextvars.copy_context()  # torch's settings belong to it
        context.run(unchecked.set, True)
        grad = torch.is_grad_enabled()

        def run(*owner: Any) -> None:
            with torch.set_grad_enabled(grad), tracing_thread_locally():
                context.run(job, *owner)

        with self.changed:
            if mark in self.marks or len(self.marks) >= _MOST or self.is_stopping:
                return mark in self.marks
            self.marks.add(mark)
            self.put(_Job(mark, asked, run))
        return True

    def _forget(self, owner: "weakref.ref[Any]") -> None:
        """Leaves out what waits for one that is gone."""
        with self.changed:
            gone = [job for job in self.waiting if job.owner is owner]
            for job in gone:
                self.waiting.remove(job)
                self.marks.discard(job.mark)
            self.changed.notify_all()

    @property
    def goes_second(self) -> bool:
        """Returns whether there is work, here or elsewhere, that calls of this thread go before."""
        return bool(self.marks or turns.are_taken) and not self.is_here

    def wait(self, timeout: float | None) -> bool:
        if self.is_here:
            return True
        with self.changed:
            return self.changed.wait_for(lambda: not self.marks, timeout)

    def do(self, item: _Job) -> None:
        owner = () if item.owner is None else (item.owner(),)
        sys.setprofile(self._give_way)  # of this thread alone
        try:
            if None not in owner:  # else it left just now
                item.run(*owner)
        finally:
            sys.setprofile(None)
            del owner
            with self.changed:
                self.marks.discard(item.mark)
                self.changed.notify_all()

    def _give_way(self, *_: Any) -> None:
        if self.is_stopping:
            raise Stopped
        now = time.perf_counter()
        if now - self._resumed < _RUN and not turns.come_first:
            return
        while (left := now + self._pause() - time.perf_counter()) > 0:
            if turns.come_first:
                turns.wait(left)
            else:
                time.sleep(min(left, _LOOK))
        self._resumed = time.perf_counter()

    def _pause(self) -> float:
        if is_capturing():
            return _CAPTURE_PAUSE
        if not turns.any_call:
            return 0.0
        return _LONGEST_PAUSE if turns.leave_time else _PAUSE


_worker = _Worker()


def _after_fork() -> None:
    global _worker
    _worker = _Worker()
    compiler_process.forget_parent_process()


def _stop() -> None:
    _worker.stop()


atexit.register(_stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def submit_compilation(mark: Hashable, job: Callable[..., None], owner: Any = None) -> bool:
    """Queues a compilation unless it is already queued; returns whether it is queued.

    Args:
        mark: What it is, among what its owner asks for.
        job: Compiles it; must not raise.
        owner: Who asks, and is given to `job`, which must not know it otherwise. It is not kept
            alive: once it is gone, what waits for it is left out. None: it is compiled anyway.

    Returns:
        Whether it is waiting, or under way.
    """
    return _worker.submit(mark, job, owner)


def is_background_thread() -> bool:
    """Returns whether the calling thread is the background compile thread."""
    return _worker.is_here


def wait_until_idle(timeout: float | None = None) -> bool:
    """Waits for all queued compilations; returns False on timeout.

    Args:
        timeout: Seconds; None: for as long as it takes.

    Returns:
        Whether nothing is left.
    """
    return _worker.wait(timeout)


def prioritize_calls(
    run: Callable[[list[Any]], Sequence[Any]],
) -> Callable[[list[Any]], Sequence[Any]]:
    """Wraps a boxed function so that background compilation pauses during its calls."""

    def call(args: list[Any]) -> Sequence[Any]:
        if not _worker.goes_second:
            return run(args)
        thread = threading.get_ident()
        turns.begins(thread)
        try:
            return run(args)
        finally:
            turns.ends(thread)

    return call


def prioritize_backward(outputs: Sequence[Any]) -> None:
    """Pauses background compilation during the backward pass of these outputs."""
    worker = _worker
    if not worker.goes_second:
        return

    def begins(_: Tensor) -> None:
        thread = threading.get_ident()
        if not (turns.is_in_call(thread) or worker.is_here):
            turns.begins(thread)
            late = threading.Timer(_LONGEST_BACKWARD_S, turns.ends, (thread,))
            late.daemon = True
            late.start()

            def ends() -> None:
                late.cancel()
                turns.ends(thread)

            after_backward(ends)

    for output in outputs:
        if isinstance(output, Tensor) and output.grad_fn is not None:
            output.register_hook(begins)

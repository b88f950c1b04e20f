"""Copies tensors and runs callbacks so that signals and errors leave no half state.

Python runs the handlers of signals between two of its instructions, in the main thread, and they
may raise (Ctrl-C raises KeyboardInterrupt). What happens inside one call of C code is done whole.
"""

import contextlib
import operator
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

_PATIENCE = 100
_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCHLD")
    if hasattr(signal, name)
)


def call_uninterrupted(actions: Iterable[Callable[[], Any]]) -> None:
    """Calls C functions in order, with no signal handler running in between.

    Args:
        actions: Functions written in C, or `functools.partial` of such.
    """
    deque(map(operator.call, actions), maxlen=0)


def retry_until_complete(action: Callable[[], Any]) -> None:
    """Repeats an idempotent action until it completes without an exception."""
    for _ in range(_PATIENCE):
        with contextlib.suppress(BaseException):
            action()
            return
    action()


def copy_atomically(
    targets: list[Tensor],
    values: list[Tensor],
    taken: list[Any],
    rest: Any,
    before: Sequence[Callable[[], Any]] = (),
) -> None:
    """Copies values to targets, all of them even if a signal interrupts.

    Args:
        targets: What to copy to.
        values: What to copy; none shares memory with a target.
        taken: Gets `rest` when, and only when, all contents are new.
        rest: Anything.
        before: Other writes; see `call_uninterrupted`. They may be repeated.
    """
    copy = partial(torch._foreach_copy_, targets, values)
    try:
        call_uninterrupted([*before, *([copy] if targets else []), partial(taken.append, rest)])
    except BaseException:
        if not taken:
            copies = [partial(x.copy_, value) for x, value in zip(targets, values, strict=True)]
            retry_until_complete(partial(call_uninterrupted, [*before, *copies]))
            taken.append(rest)
        raise


def fill_lost_tensors(tensors: Iterable[Tensor]) -> None:
    """Fills tensors whose contents are lost with NaN or the smallest integer."""
    for tensor in tensors:
        tensor.data = torch.full_like(tensor, _nothing(tensor.dtype))


def _nothing(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype is torch.bool else torch.iinfo(dtype).min


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Defers Python signal handlers to the end of the block (context manager)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {n: h for n in _SIGNALS if callable(h := signal.getsignal(n))}
    came: list[int] = []
    try:
        for number in handlers:
            signal.signal(number, lambda n, _: came.append(n))
        yield
    finally:
        try:
            _restore(handlers)
        finally:
            _deliver(came)


def _restore(handlers: dict[Any, Any]) -> None:
    """Puts all handlers back; what one of them raises meanwhile is raised at the end."""
    raised: BaseException | None = None
    for number, handler in handlers.items():
        while signal.getsignal(number) is not handler:
            try:
                signal.signal(number, handler)
            except BaseException as error:
                raised = error
    if raised is not None:
        raise raised


def _deliver(numbers: list[int]) -> None:
    if numbers:
        try:
            signal.raise_signal(numbers.pop(0))
        finally:
            _deliver(numbers)

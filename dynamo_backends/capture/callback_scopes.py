"""Keeps a stack of the `with` blocks that set Dynamo's callback in this thread.

Dynamo keeps one callback per thread, which is asked before each Python frame runs: a function
compiles the frame, False runs what is compiled already, None leaves Dynamo out. A scope sets it and
puts back what was there. Scopes hold no state of their own, so one object can be entered several
times at once, from any number of threads.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self

from dynamo_backends._torch_private.dynamo_control import (
    not_traced,
    resolve_stance_callback,
    set_callback,
    stance_per_thread,
)
from dynamo_backends.interface import stance

Callback = Callable[..., Any] | Literal[False] | None
Hook = Callable[[], Callable[[], Any]]
"""Changes something and returns what undoes it."""


@dataclass(eq=False)
class _Entry:
    owner: "CallbackScope"
    prior: Callback
    undo: list[Callable[[], Any]]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.entries: list[_Entry] = []


_thread = _Thread()


class CallbackScope:
    """A `with` block that sets Dynamo's callback of this thread; re-entrant, thread-safe.

    A block that is left out of order (a generator suspended inside one) leaves those inside it
    untouched, and the callback from before is still restored by the last one.
    """

    def _callback(self) -> Callback:
        raise NotImplementedError

    def _hooks(self) -> tuple[Hook, ...]:
        return ()

    @not_traced
    def __enter__(self) -> Self:
        """Sets the callback of this thread."""
        prior = set_callback(None)
        undo: list[Callable[[], Any]] = []
        try:
            undo.extend(hook() for hook in self._hooks())
            callback = resolve_stance_callback(self._callback())
        except BaseException:
            _run_backwards(undo)
            set_callback(prior)
            raise
        _thread.entries.append(_Entry(self, prior, undo))
        set_callback(callback)
        return self

    @not_traced
    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Restores the callback from before.

        Raises:
            RuntimeError: This thread is not in such a block.
        """
        current = set_callback(None)
        entries = _thread.entries
        found = [i for i, entry in enumerate(entries) if entry.owner is self]
        if not found:
            set_callback(current)
            raise RuntimeError(
                f"{self!r} is not active in this thread. Enter it with `with` in the thread that "
                "leaves it."
            )
        entry = entries.pop(found[-1])
        _run_backwards(entry.undo)
        if found[-1] == len(entries):
            current = entry.prior
        else:
            entries[found[-1]].prior = entry.prior
        set_callback(current)


def _run_backwards(functions: list[Callable[[], Any]]) -> None:
    for function in reversed(functions):
        function()


def forbid_new_compilations() -> Callable[[], None]:
    """Keeps this thread from compiling anything new; returns the function that undoes it."""
    end = stance_per_thread(stance.current_stance)
    stance.thread.quiescent += 1

    def undo() -> None:
        stance.thread.quiescent -= 1
        end()

    return undo


def forbid_compiled_code() -> Callable[[], None]:
    """Makes this thread run everything in eager; returns the function that undoes it."""
    end = stance_per_thread(stance.current_stance)
    stance.thread.disabled += 1

    def undo() -> None:
        stance.thread.disabled -= 1
        end()

    return undo

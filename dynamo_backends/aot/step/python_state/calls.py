"""What calls do that no instruction shows: methods of containers, and calls that read the world."""

import builtins
import datetime
import io
import math
import operator
import os
import random
import time
import types
import uuid
from typing import Any

import numpy as np
import torch

from dynamo_backends.aot.step.python_state.bytecode import UNKNOWN, Method
from dynamo_backends.aot.step.python_state.places import Place

APPENDING = frozenset({"append", "extend"})
"""Methods of lists and deques that add at the end and read nothing."""

CHANGING = frozenset((
    "add", "appendleft", "extendleft", "insert", "pop", "popleft", "popitem", "remove", "discard",
    "clear", "sort", "reverse", "rotate", "update", "setdefault", "move_to_end",
    "difference_update", "intersection_update", "symmetric_difference_update", "__setitem__",
    "__delitem__", "__iadd__", "fill", "itemset", "put", "partition", "resize",
))  # fmt: skip
"""Methods of containers that change them otherwise."""


class StandInRefused(Exception):
    """User code asks something of a number that only the number itself can answer."""

    def __init__(self, place: Place):
        super().__init__(place.name)
        self.place = place


class _World:
    """Calls whose results come from outside of the program."""

    def __init__(self) -> None:
        clocks = (
            time.time, time.time_ns, time.perf_counter, time.perf_counter_ns, time.monotonic,
            time.monotonic_ns, time.process_time, time.process_time_ns, time.localtime, time.gmtime,
            time.strftime, time.ctime, time.thread_time,
        )  # fmt: skip
        self._reasons: dict[Any, str] = dict.fromkeys(clocks, "asks for the time")
        self._reasons |= dict.fromkeys((open, io.open, os.open, os.read), "opens a file")
        self._reasons |= dict.fromkeys((os.urandom, uuid.uuid4, uuid.uuid1), "draws a random value")
        self._reasons[builtins.input] = "asks for input"

    def reason(self, function: Any) -> str | None:
        """What a function does, in words; None if its result follows from its arguments."""
        owner = getattr(function, "__self__", None)
        if owner is not None and not isinstance(owner, types.ModuleType):
            found = self.reason_of_method(owner, getattr(function, "__name__", ""))
            if found is not None:
                return found
        try:
            return self._reasons.get(function)
        except TypeError:  # not hashable
            return None

    def reason_of_method(self, owner: Any, name: str) -> str | None:
        """The same for a method."""
        if isinstance(owner, random.Random | np.random.RandomState | np.random.Generator):
            return "draws a random number (not torch's)"
        if isinstance(owner, type) and issubclass(owner, datetime.date):
            return "asks for the time" if name in ("now", "utcnow", "today") else None
        if isinstance(owner, io.IOBase) and name not in ("flush", "isatty", "fileno"):
            return "reads or writes a file"
        return None


READS_WORLD = _World()

_TAKES_STAND_INS = frozenset(
    {float, int, bool, abs, max, min, sum, range, divmod, pow, list, tuple, dict, len, enumerate,
     zip, slice, getattr, setattr, hasattr, map, filter, sorted, any, all, builtins.print,
     *(f for f in vars(math).values() if callable(f)),
     *(f for f in vars(operator).values() if callable(f) and hasattr(f, "__hash__"))}
)  # fmt: skip


def needs_value(function: Any) -> bool:
    """Whether a function could tell a number from a tensor that stands in for it."""
    if isinstance(function, Method):
        value = function.value
        if isinstance(function.owner, list | set | dict | str) or value is UNKNOWN:
            return isinstance(function.owner, set | dict | str)
    else:
        value = function
    if value is UNKNOWN or isinstance(value, types.FunctionType | types.MethodType):
        return False
    module = getattr(value, "__module__", None) or ""
    if module.split(".")[0] == "torch" or (
        isinstance(value, type) and issubclass(value, torch.Tensor)
    ):
        return False
    try:
        return isinstance(value, type | types.BuiltinFunctionType) and value not in _TAKES_STAND_INS
    except TypeError:
        return True

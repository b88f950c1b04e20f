"""What a call reads and writes that no instruction shows, and calls that a step refuses."""

import builtins
from collections import deque
from collections.abc import Sequence
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dynamo_backends.aot.step.python_state.bytecode import UNKNOWN, Method
from dynamo_backends.aot.step.python_state.calls import (
    APPENDING,
    CHANGING,
    READS_WORLD,
    StandInRefused,
    needs_value,
)
from dynamo_backends.aot.step.python_state.places import CONTAINERS
from dynamo_backends.interface.errors import StepCaptureError

if TYPE_CHECKING:
    from dynamo_backends.aot.step.python_state.ledger import Ledger


class Calls:
    """The calls of a traced step.

    Args:
        ledger: Where reads and writes are noted.
    """

    def __init__(self, ledger: "Ledger"):
        self._ledger = ledger

    def note(self, frame: FrameType, function: Any, args: list[Any]) -> Any:
        """Something is called; returns its result if that is known, else `UNKNOWN`."""
        self._refuse_stand_ins(function, args)
        if isinstance(function, Method):
            return self._method(frame, function, args)
        reason = None if function is UNKNOWN else READS_WORLD.reason(function)
        self._refuse(reason)
        if function in _ATTRIBUTE_FUNCTIONS and args:
            return self._attribute_function(frame, function, args)
        if function is builtins.vars and args and self._ledger.is_old(args[0]):
            found = vars(args[0])
            self._ledger.adopt(found, self._ledger.name_of(args[0]))
            return found
        if not isinstance(function, FunctionType) or self._ledger.is_library(
            function.__code__.co_filename
        ):
            self._hand_over(frame, function, args)
        return UNKNOWN

    def _hand_over(self, frame: FrameType, function: Any, args: Sequence[Any]) -> None:
        """A function that is not followed may read all of its arguments."""
        is_torchs = (getattr(function, "__module__", None) or "").split(".")[0] == "torch"
        for each in args:
            self._ledger.contents(frame, each)
            is_read = not is_torchs and not isinstance(function, type)
            if is_read and _is_record(each) and self._ledger.is_old(each):
                self._ledger.contents_of(vars(each), self._ledger.name_of(each))

    def _refuse(self, reason: str | None) -> None:
        if reason is not None:
            raise StepCaptureError(
                f"the step {reason} at {self._ledger.line()}; in one graph the result would be "
                "the same at each step. Do it outside of the step and pass the result as an "
                'argument, or pass fallback="split".'
            )

    def _refuse_stand_ins(self, function: Any, args: Sequence[Any]) -> None:
        """Numbers that tensors stand in for must not be asked what they are."""
        if self._ledger.stand_ins and needs_value(function):
            for each in args:
                if id(each) in self._ledger.stand_ins:
                    raise StandInRefused(self._ledger.stand_ins[id(each)])

    def _attribute_function(self, frame: FrameType, function: Any, args: list[Any]) -> Any:
        owner, name = args[0], args[1] if len(args) > 1 else UNKNOWN
        if not isinstance(name, str):
            attributes = getattr(owner, "__dict__", None)
            if self._ledger.is_old(owner) and isinstance(attributes, dict):
                self._ledger.contents_of(attributes, self._ledger.name_of(owner))
            return UNKNOWN
        if function in (builtins.setattr, builtins.delattr):
            self._ledger.store_attribute(frame, owner, name)
            return UNKNOWN
        value = self._ledger.load_attribute(frame, owner, name)
        return value if function is builtins.getattr else UNKNOWN

    def _method(self, frame: FrameType, method: Method, args: list[Any]) -> Any:
        owner, name = method.owner, method.name
        reason = READS_WORLD.reason_of_method(owner, name)
        if reason is None and isinstance(owner, ModuleType | type) and method.value is not UNKNOWN:
            reason = READS_WORLD.reason(method.value)
        self._refuse(reason)
        is_container = isinstance(owner, CONTAINERS) and self._ledger.is_old(owner)
        if is_container and isinstance(owner, dict) and name in ("get", "setdefault") and args:
            value = self._ledger.item(owner, args[0])
            if name == "setdefault":
                self._ledger.store_item(frame, owner, args[0])
            return value
        if is_container and name in APPENDING and isinstance(owner, list | deque):
            for each in args if name == "extend" else ():
                self._ledger.contents(frame, each)
            is_limited = getattr(owner, "maxlen", None) is not None
            self._ledger.change(owner, appends=name == "append" or not is_limited)
            self._ledger.changed[id(owner)].appended += name == "append"
        elif is_container and name in CHANGING:
            self._ledger.change(owner, appends=False)
        elif is_container:
            self._ledger.contents_of(owner)
        elif name in ("__reduce_ex__", "__dict__") and self._ledger.is_old(owner):
            self._ledger.contents_of(vars(owner), self._ledger.name_of(owner))
        elif name in ("__next__", "send") and self._ledger.is_old(owner):
            self._ledger.contents(frame, owner)
        if isinstance(owner, ModuleType):
            return self._call_of_module(frame, method.value, args)
        if not is_container and not isinstance(method.value, FunctionType):
            self._hand_over(frame, method.value, args)
        return UNKNOWN

    def _call_of_module(self, frame: FrameType, function: Any, args: list[Any]) -> Any:
        if not isinstance(function, FunctionType) or self._ledger.is_library(
            function.__code__.co_filename
        ):
            self._hand_over(frame, function, args)
        return UNKNOWN


_ATTRIBUTE_FUNCTIONS = (builtins.getattr, builtins.hasattr, builtins.setattr, builtins.delattr)


def _is_record(value: Any) -> bool:
    """Whether an object's attributes are data that other code may read."""
    known = nn.Module | torch.optim.Optimizer | ModuleType | type | FunctionType | MethodType
    return isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, known)

"""What user code reads and writes in Python while a step is traced, and where that lives.

An object is old if the code reached it from outside: from a global name, a closure, a default, a
model, an optimizer, an argument, or an old object. What is read of old objects is a condition of
the trace; what is written to them is an effect of the step.
"""

import enum
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from dynamo_backends.aot.step.python_state import places as kinds
from dynamo_backends.aot.step.python_state.bytecode import (
    NULL,
    UNKNOWN,
    Method,
    Observer,
    look_up,
)
from dynamo_backends.aot.step.python_state.called import Calls
from dynamo_backends.aot.step.python_state.old import Functions, OldObjects
from dynamo_backends.aot.step.python_state.places import (
    CONTAINERS,
    MISSING,
    Attributes,
    ClassAttributes,
    Place,
    Variable,
)
from dynamo_backends.interface.errors import StepCaptureError


@dataclass
class Written:
    """A place that the step writes to, and what was there before."""

    place: Place
    before: Any


@dataclass
class Changed:
    """A container that the step changes by its methods.

    Attributes:
        container: The container.
        place: What to call it.
        before: A copy of what it was.
        only_appends: Nothing but additions at the end.
        appended: How many single ones.
    """

    container: Any
    place: Place
    before: Any
    only_appends: bool
    appended: int = 0


class Ledger(Observer):
    """Keeps account of reads and writes.

    Args:
        function: The step function.
        roots: Objects from outside: models' modules, optimizers and what they own, arguments.
        is_library: Whether a file holds code whose globals are taken for constant.
        line: Says the user's line.

    Attributes:
        reads: Places that were read before the step wrote to them, and what was there.
        contents_read: Containers that were read as a whole: a place, the container, its items.
        written: Places that the step writes to.
        changed: Containers that it changes by their methods.
        stand_ins: Places whose numbers a tensor stands in for, by the tensor's id.
        objects: What is known from outside.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        roots: Iterable[Any],
        is_library: Callable[[str], bool],
        line: Callable[[], str],
    ):
        self.reads: dict[tuple[int, Any], tuple[Place, Any]] = {}
        self.contents_read: dict[int, tuple[Place, Any, list[Any]]] = {}
        self.written: dict[tuple[int, Any], Written] = {}
        self.changed: dict[int, Changed] = {}
        self.stand_ins: dict[int, Place] = {}
        self.objects = OldObjects()
        self._functions = Functions(self.objects)
        self._calls = Calls(self)
        self.is_library = is_library
        self.line = line
        for root in roots:
            self.adopt(root, type(root).__name__)
        for each in self._functions.adopt(function):
            self._note_defaults(each)

    # What is old.

    def adopt(self, value: Any, name: str) -> Any:
        """Makes an object known as one from outside; returns it."""
        return self.objects.adopt(value, name)

    def is_old(self, value: Any) -> bool:
        """Whether an object is from outside."""
        return value in self.objects

    def name_of(self, value: Any) -> str:
        """What a user would call an old object."""
        return self.objects.name_of(value)

    def enter(self, frame: FrameType, callee: Any) -> None:
        """A followed frame starts."""
        function = self._functions.enter(frame, callee)
        if function is not None and (function.__defaults__ or function.__kwdefaults__):
            self._note_defaults(function)

    def forget_frames(self) -> None:
        """Nothing is followed any more."""
        self._functions.forget_frames()

    def _note_defaults(self, function: FunctionType) -> None:
        for name in ("__defaults__", "__kwdefaults__"):
            self._note(Attributes(function), name, f"{function.__name__}.{name}")
        if function.__kwdefaults__:
            self.contents_of(function.__kwdefaults__, f"{function.__name__}.__kwdefaults__")

    # Reads.

    def _note(self, container: Any, key: Any, name: str) -> Any:
        """A read: of the value before the step, or of one that the step has written."""
        place = Place(container, key, name, "")
        identity = place.identity
        value = place.get()
        if identity in self.written or id(container) in self.changed:
            return value
        if identity not in self.reads:
            place.line = self.line()
            self.reads[identity] = place, value
        return value if value is MISSING else self.adopt(value, name)

    def load_global(self, frame: FrameType, name: str) -> Any:
        """See `Observer`."""
        if self.is_library(frame.f_code.co_filename):
            return frame.f_globals[name]
        return self._note(frame.f_globals, name, name)

    def load_cell(self, frame: FrameType, name: str) -> Any:
        """See `Observer`."""
        cell = self._functions.cell(frame, name)
        if cell is None:
            return frame.f_locals.get(name, UNKNOWN)
        value = self._note(Variable(cell), None, name)
        return UNKNOWN if value is MISSING else value

    def load_attribute(self, frame: FrameType, owner: Any, name: str) -> Any:
        """See `Observer`."""
        if owner is UNKNOWN:
            self._note_everywhere(name)
            return UNKNOWN
        if isinstance(owner, Method) or owner is NULL or isinstance(owner, enum.Enum):
            return UNKNOWN
        if not self.is_old(owner):
            return look_up(owner, name)
        return self._attribute(owner, name)

    def _attribute(self, owner: Any, name: str) -> Any:
        label = f"{self.name_of(owner)}.{name}"
        if isinstance(owner, ModuleType):
            if self.is_library(getattr(owner, "__file__", None) or "<frozen>"):
                return vars(owner).get(name, UNKNOWN)
            return _known(self._note(vars(owner), name, label))
        if isinstance(owner, type):
            return self._class_attribute(owner, name, label)
        if isinstance(owner, _PATCHED_KINDS) and name in _PATCHED:
            return UNKNOWN
        if isinstance(owner, nn.Module):
            for table in (owner._parameters, owner._buffers, owner._modules):
                if name in table:
                    return self.adopt(table[name], label)
        attributes = getattr(owner, "__dict__", None)
        found = _in_classes(type(owner), name)
        if found is not None and _decides(found):
            if isinstance(found, types.MemberDescriptorType):
                return _known(self._note(Attributes(owner), name, label))
            return UNKNOWN
        if not isinstance(attributes, dict):
            return UNKNOWN if found is None else look_up(owner, name)
        value = self._note(attributes, name, label)
        if value is not MISSING:
            return value
        if found is None:
            return UNKNOWN
        self._class_attribute(type(owner), name, label)
        return UNKNOWN if hasattr(type(found), "__get__") else found

    def _class_attribute(self, klass: type, name: str, label: str) -> Any:
        for each in klass.__mro__:
            if name in vars(each):
                if each.__module__ == "builtins" or _is_of_library(each, self.is_library):
                    return look_up(klass, name)
                value = self._note(ClassAttributes(each), name, label)
                return UNKNOWN if hasattr(type(value), "__get__") else value
        return UNKNOWN

    def _note_everywhere(self, name: str) -> None:
        """An attribute of an object that is not known: it may be that of any old one."""
        for owner in self.objects:
            attributes = getattr(owner, "__dict__", None)
            if isinstance(owner, nn.Module | ModuleType | type) or not isinstance(attributes, dict):
                continue
            if name in attributes:
                self._note(attributes, name, f"{self.name_of(owner)}.{name}")

    def load_item(self, frame: FrameType, container: Any, key: Any) -> Any:
        """See `Observer`."""
        if isinstance(container, dict):
            return self.item(container, key)
        if isinstance(container, list | deque):
            if not self.is_old(container):
                return _item_or_unknown(container, key)
            if not isinstance(key, int) or key < 0:
                self.contents(frame, container)
                return _item_or_unknown(container, key)
            return _known(self._note(container, key, f"{self.name_of(container)}[{key}]"))
        if isinstance(container, tuple):
            return _item_or_unknown(container, key)
        self.contents(frame, container)
        return UNKNOWN

    def item(self, container: dict[Any, Any], key: Any) -> Any:
        """An item of a dictionary is read."""
        if not self.is_old(container):
            return _item_or_unknown(container, key)
        if key is UNKNOWN or not _is_hashable(key):
            self.contents_of(container)
            return UNKNOWN
        return _known(self._note(container, key, f"{self.name_of(container)}[{_short(key)}]"))

    def contents(self, frame: FrameType, container: Any) -> None:
        """See `Observer`."""
        if container is UNKNOWN or not self.is_old(container):
            return
        if isinstance(container, CONTAINERS):
            self.contents_of(container)
        elif hasattr(type(container), "__next__"):
            raise StepCaptureError(
                f"the step reads from the iterator {self.name_of(container)!r} at {self.line()}, "
                "which gives something else at each step. Take the item outside of the step and "
                'pass it as an argument, or pass fallback="split".'
            )

    def contents_of(self, container: Any, name: str | None = None) -> None:
        """All items of an old container are read."""
        if id(container) in self.contents_read:
            return
        self.adopt(container, name or self.name_of(container))
        change = self.changed.get(id(container))
        if change is not None:
            change.only_appends = False
        seen = container if change is None else change.before
        place = Place(container, None, self.name_of(container), self.line())
        items = kinds.items_of(self._before_writes(seen))
        self.contents_read[id(container)] = place, container, items
        if not isinstance(container, bytearray) and not hasattr(container, "tobytes"):
            for each in items:
                self.adopt(each, f"{place.name}[...]")

    def _before_writes(self, container: Any) -> Any:
        """A container as it was before the step wrote to single items of it."""
        written = [w for w in self.written.values() if w.place.container is container]
        if not written:
            return container
        copy = kinds.copy_of(container)
        for each in written:
            Place(copy, each.place.key, "", "").set(each.before)
        return copy

    # Writes.

    def _write(self, container: Any, key: Any, name: str) -> None:
        place = Place(container, key, name, self.line())
        identity = place.identity
        if identity not in self.written:
            self.written[identity] = Written(place, place.get())

    def store_global(self, frame: FrameType, name: str) -> None:
        """See `Observer`."""
        self._write(frame.f_globals, name, name)

    def store_cell(self, frame: FrameType, name: str) -> None:
        """See `Observer`."""
        cell = self._functions.cell(frame, name)
        if cell is not None:
            self._write(Variable(cell), None, name)

    def store_attribute(self, frame: FrameType, owner: Any, name: str) -> None:
        """See `Observer`."""
        if owner is UNKNOWN:
            for each in self.objects:
                attributes = getattr(each, "__dict__", None)
                if isinstance(attributes, dict) and name in attributes:
                    self._write_attribute(each, name)
        elif self.is_old(owner):
            self._write_attribute(owner, name)

    def _write_attribute(self, owner: Any, name: str) -> None:
        if isinstance(owner, Tensor):
            return
        label = f"{self.name_of(owner)}.{name}"
        found = None if isinstance(owner, type) else _in_classes(type(owner), name)
        attributes = getattr(owner, "__dict__", None)
        if isinstance(found, types.MemberDescriptorType):
            self._write(Attributes(owner), name, label)
        elif found is not None and _decides(found):
            return  # a property: its function is followed
        elif isinstance(owner, type):
            self._write(ClassAttributes(owner), name, label)
        elif isinstance(attributes, dict):
            tables = ("_parameters", "_buffers", "_modules")
            if isinstance(owner, nn.Module) and any(name in vars(owner)[t] for t in tables):
                return  # compared by whoever traces
            self._write(attributes, name, label)

    def store_item(self, frame: FrameType, container: Any, key: Any) -> None:
        """See `Observer`."""
        if not self.is_old(container) or not isinstance(container, CONTAINERS):
            return
        is_place = isinstance(container, dict) and key is not UNKNOWN and _is_hashable(key)
        is_place = is_place or (
            isinstance(container, list) and isinstance(key, int) and 0 <= key < len(container)
        )
        if is_place and id(container) not in self.changed:
            self._write(container, key, f"{self.name_of(container)}[{_short(key)}]")
        else:
            self.change(container, appends=False)

    def change(self, container: Any, appends: bool) -> None:
        """A container is changed by a method, or only gets more at its end."""
        if not appends:
            self.contents_of(container)
        change = self.changed.get(id(container))
        if change is None:
            place = Place(container, None, self.name_of(container), self.line())
            before = kinds.copy_of(container)
            self.changed[id(container)] = Changed(container, place, before, appends)
        else:
            change.only_appends = change.only_appends and appends

    # Calls.

    def call(self, frame: FrameType, function: Any, args: list[Any]) -> Any:
        """See `Observer`."""
        return self._calls.note(frame, function, args)

    # Afterwards.

    def put_back(self) -> None:
        """Undoes what the traced code wrote."""
        for change in self.changed.values():
            kinds.restore(change.container, change.before)
        for written in self.written.values():
            if written.place.get() is not written.before:
                written.place.set(written.before)


# Methods that stand for others while a step is traced.
_PATCHED = ("step", "zero_grad", "get_last_lr")
_PATCHED_KINDS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, nn.Module)


def _known(value: Any) -> Any:
    return UNKNOWN if value is MISSING else value


def _in_classes(klass: type, name: str) -> Any:
    return next((vars(each)[name] for each in klass.__mro__ if name in vars(each)), None)


def _decides(found: Any) -> bool:
    """Whether what a class has under a name comes before an instance's own attribute."""
    return hasattr(type(found), "__set__") or hasattr(type(found), "__delete__")


def _is_of_library(klass: type, is_library: Callable[[str], bool]) -> bool:
    module = sys.modules.get(klass.__module__)
    file = getattr(module, "__file__", None)
    return file is not None and is_library(file)


def _item_or_unknown(container: Any, key: Any) -> Any:
    if key is UNKNOWN or not _is_hashable(key):
        return UNKNOWN
    try:
        if type(container) is not dict and isinstance(container, dict):
            return dict.get(container, key, UNKNOWN)
        return container[key]
    except (KeyError, IndexError, TypeError):
        return UNKNOWN


def _is_hashable(key: Any) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True


def _short(key: Any) -> str:
    return repr(key) if kinds.is_simple(key) else type(key).__name__

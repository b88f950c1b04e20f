"""Which objects a traced step knows from outside, and which function each frame executes."""

import gc
import inspect
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any

from torch import Tensor

from dynamo_backends.aot.step.python_state.bytecode import UNKNOWN, Method
from dynamo_backends.aot.step.python_state.frames import is_helper
from dynamo_backends.aot.step.python_state.places import is_simple


class OldObjects:
    """The objects from outside that are known, by identity.

    Attributes:
        on_adopt: Is given each object that becomes known.
    """

    def __init__(self) -> None:
        self.on_adopt: Callable[[Any], None] | None = None
        self._old: dict[int, Any] = {}
        self._names: dict[int, str] = {}

    def __iter__(self) -> Iterator[Any]:
        """All of them."""
        return iter(list(self._old.values()))

    def __contains__(self, value: Any) -> bool:
        """Whether an object is from outside."""
        return id(value) in self._old and self._old[id(value)] is value

    def name_of(self, value: Any) -> str:
        """What a user would call an object."""
        return self._names.get(id(value), type(value).__name__)

    def adopt(self, value: Any, name: str) -> Any:
        """Makes an object known as one from outside; returns it."""
        if isinstance(value, Tensor) or is_simple(value):
            return value
        if id(value) not in self._old:
            self._old[id(value)] = value
            self._names[id(value)] = name
            if self.on_adopt is not None:
                self.on_adopt(value)
            self._adopt_parts(value, name)
        return value

    def _adopt_parts(self, value: Any, name: str) -> None:
        if isinstance(value, tuple | frozenset):
            for i, each in enumerate(value):
                self.adopt(each, f"{name}[{i}]")
        elif isinstance(value, FunctionType):
            for cell in value.__closure__ or ():
                self._old.setdefault(id(cell), cell)
            self.adopt(value.__defaults__, f"{name}.__defaults__")
            self.adopt(tuple((value.__kwdefaults__ or {}).values()), f"{name}.__kwdefaults__")


class Functions:
    """The functions that followed frames execute, which is what knows their closures.

    Args:
        objects: Where functions become known.
    """

    def __init__(self, objects: OldObjects):
        self._objects = objects
        self._by_frame: dict[FrameType, FunctionType] = {}
        self._by_code: dict[CodeType, FunctionType] = {}
        self._unknown: set[CodeType] = set()
        # A function that is made while the step is traced is none of those.
        self._existing = {id(x) for x in gc.get_objects() if type(x) is FunctionType}

    def adopt(self, function: Any) -> Iterator[FunctionType]:
        """Makes a step function known: bound, partial, or an object that can be called, too."""
        name = getattr(function, "__name__", type(function).__name__)
        self._objects.adopt(function, name)
        inner = getattr(function, "func", None) or getattr(function, "__wrapped__", None)
        if inner is not None:
            yield from self.adopt(inner)
            given = (*getattr(function, "args", ()), *getattr(function, "keywords", {}).values())
            for each in given:
                self._objects.adopt(each, "an argument")
        if inspect.ismethod(function):
            self._objects.adopt(function.__self__, "self")
            function = function.__func__
        if isinstance(function, FunctionType):
            self._objects.adopt(function, name)
            self._by_code[function.__code__] = function
            yield function

    def enter(self, frame: FrameType, callee: Any) -> FunctionType | None:
        """A frame starts: returns its function, if that is from outside."""
        function = self._find(frame, callee)
        if function is None:
            return None
        self._by_frame[frame] = function
        if isinstance(callee, Method) and callee.owner in self._objects:
            self._objects.adopt(function, function.__name__)
        return function if function in self._objects else None

    def forget_frames(self) -> None:
        """The step has been traced: frames would keep all that their variables hold."""
        self._by_frame.clear()

    def cell(self, frame: FrameType, name: str) -> CellType | None:
        """The cell of a frame's variable, if it was there before the step."""
        function = self._by_frame.get(frame)
        if function is None or name not in function.__code__.co_freevars:
            return None
        cell = (function.__closure__ or ())[function.__code__.co_freevars.index(name)]
        return cell if cell in self._objects else None

    def _find(self, frame: FrameType, callee: Any) -> FunctionType | None:
        code = frame.f_code
        value = callee.value if isinstance(callee, Method) else callee
        value = inspect.unwrap(value) if callable(value) and value is not UNKNOWN else value
        value = getattr(value, "__func__", value)
        if isinstance(value, FunctionType) and value.__code__ is code:
            return value
        known = self._by_code.get(code)
        if known is not None and _has_variables(known, frame):
            return known
        for each in _named_alike(frame):
            if isinstance(each, FunctionType) and each.__code__ is code:
                self._objects.adopt(each, each.__qualname__)
                return each
        return self._search(frame)

    def _search(self, frame: FrameType) -> FunctionType | None:
        """For what a library calls: the only function of this code with these variables."""
        code = frame.f_code
        if not code.co_freevars or is_helper(frame) or code in self._unknown:
            return None
        found = [f for f in gc.get_referrers(code) if isinstance(f, FunctionType)]
        found = [f for f in found if f.__code__ is code and id(f) in self._existing]
        matching = [f for f in found if _has_variables(f, frame)]
        if len(matching) != 1:
            self._unknown.add(code)
            return None
        self._by_code[code] = matching[0]
        self._objects.adopt(matching[0], matching[0].__name__)
        return matching[0]


def _named_alike(frame: FrameType) -> Iterator[Any]:
    """What has the name of a frame's code: in the class of its first argument, or globally."""
    code = frame.f_code
    owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    for klass in type(owner).__mro__ if owner is not None else ():
        found = vars(klass).get(code.co_name)
        yield from (found, getattr(found, "fget", None), getattr(found, "__func__", None))
    yield frame.f_globals.get(code.co_name)


def _has_variables(function: FunctionType, frame: FrameType) -> bool:
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            value = UNKNOWN
        if frame.f_locals.get(name, UNKNOWN) is not value:
            return False
    return True

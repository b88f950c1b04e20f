"""Follows the frames of user code while a step is traced."""

import contextlib
import gc
import inspect
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from dynamo_backends.aot.step.python_state.bytecode import UNKNOWN, Observer, ShadowStack

Trace = Callable[[FrameType, str, Any], Any]


class FollowedFrames:
    """Inside: an observer is told of the instructions of this thread's user code.

    Args:
        observer: What is told.
        is_followed: Whether a file's functions are user code.
        enter: Is given each followed frame at its start, and what was called, if that is known.

    Attributes:
        error: What the observer raised first. User code is not interrupted by it, since it might
            catch it.
    """

    def __init__(
        self,
        observer: Observer,
        is_followed: Callable[[str], bool],
        enter: Callable[[FrameType, Any], None],
    ):
        self._observer = observer
        self._is_followed = is_followed
        self._enter = enter
        self._known: dict[CodeType, bool] = {}
        self._shadows: dict[FrameType, ShadowStack] = {}
        self._thread = threading.get_ident()
        self._collecting = {getattr(f, "__code__", None) for f in gc.callbacks}
        self.error: BaseException | None = None
        self._events = _Monitoring(self) if sys.version_info >= (3, 12) else _Tracing(self)

    def __enter__(self) -> "FollowedFrames":
        """Begins."""
        self._events.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends."""
        self._events.stop()
        self._shadows.clear()

    def follows(self, code: CodeType) -> bool:
        """Whether the frames of a code object are followed."""
        followed = self._known.get(code)
        if followed is None:
            followed = self._known[code] = self._is_followed(code.co_filename)
        return followed

    def start(self, frame: FrameType) -> bool:
        """A frame starts, or a generator goes on; returns whether it is followed."""
        if is_helper(frame) and frame.f_back not in self._shadows:
            return False  # called by a library
        if threading.get_ident() != self._thread or self._is_interlude(frame):
            return False
        if frame not in self._shadows:
            self._shadows[frame] = ShadowStack(self._observer, frame.f_code)
            parent = self._shadows.get(frame.f_back) if frame.f_back is not None else None
            with self._kept_apart():
                self._enter(frame, parent.callee if parent is not None else UNKNOWN)
        return True

    def _is_interlude(self, frame: FrameType) -> bool:
        """Whether Python itself runs a frame between two instructions: when it collects garbage."""
        each: FrameType | None = frame
        while each is not None and each not in self._shadows:
            if each.f_code in self._collecting or each.f_code.co_name == "__del__":
                return True
            each = each.f_back
        return False

    def instruction(self, frame: FrameType, offset: int) -> None:
        """A frame is about to execute an instruction."""
        shadow = self._shadows.get(frame)
        if shadow is not None and self.error is None:
            with self._kept_apart():
                shadow.before(frame, offset)

    @contextlib.contextmanager
    def _kept_apart(self) -> Iterator[None]:
        """Inside: errors are kept for later."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            self.error = self.error or error

    def leave(self, frame: FrameType, value: Any, ends: bool) -> None:
        """A frame returns or yields a value."""
        shadow = self._shadows.pop(frame, None) if ends else self._shadows.get(frame)
        if shadow is None or frame.f_code.co_name == "__init__":
            return
        parent = self._shadows.get(frame.f_back) if frame.f_back is not None else None
        if parent is not None:
            parent.returned = value


class _Tracing:
    """Events by `sys.settrace`, for CPython 3.11."""

    def __init__(self, frames: FollowedFrames):
        self._frames = frames
        self._before: Any = None

    def start(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._call)

    def stop(self) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Trace | None:
        if not self._frames.follows(frame.f_code):
            return None
        if not self._frames.start(frame):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._within

    def _within(self, frame: FrameType, event: str, arg: Any) -> Trace:
        if event == "opcode":
            self._frames.instruction(frame, frame.f_lasti)
        elif event == "return":
            is_generator = frame.f_code.co_flags & _GENERATORS
            self._frames.leave(frame, arg, not is_generator)
        return self._within


_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class _Monitoring:
    """Events by `sys.monitoring`, for CPython 3.12 and newer.

    There tracing by opcodes loses events (https://github.com/python/cpython/issues/103615).
    """

    def __init__(self, frames: FollowedFrames):
        self._frames = frames
        self._codes: set[CodeType] = set()
        self._monitoring: Any = sys.monitoring  # type: ignore[attr-defined]

    def start(self) -> None:
        free = [i for i in (4, 3, 5, 2, 1, 0) if self._monitoring.get_tool(i) is None]
        if not free:
            raise RuntimeError("all tools of sys.monitoring are in use; end a profiler or debugger")
        self._tool = free[0]
        self._monitoring.use_tool_id(self._tool, "dynamo_backends")
        for event, callback in self._callbacks().items():
            self._monitoring.register_callback(self._tool, event, callback)
        events = self._monitoring.events
        self._monitoring.set_events(self._tool, events.PY_START | events.PY_RESUME)
        self._monitoring.restart_events()

    def stop(self) -> None:
        self._monitoring.set_events(self._tool, 0)
        for code in self._codes:
            self._monitoring.set_local_events(self._tool, code, 0)
        for event in self._callbacks():  # before Python 3.14 a tool that is free keeps them
            self._monitoring.register_callback(self._tool, event, None)
        self._monitoring.free_tool_id(self._tool)
        self._codes.clear()

    def _callbacks(self) -> dict[int, Callable[..., Any]]:
        events = self._monitoring.events
        return {
            events.PY_START: self._start,
            events.PY_RESUME: self._start,
            events.INSTRUCTION: self._instruction,
            events.PY_RETURN: self._return,
            events.PY_YIELD: self._yield,
        }

    def _start(self, code: CodeType, offset: int) -> Any:
        if not self._frames.follows(code):
            return self._monitoring.DISABLE
        if code not in self._codes:
            events = self._monitoring.events
            wanted = events.INSTRUCTION | events.PY_RETURN | events.PY_YIELD
            self._monitoring.set_local_events(self._tool, code, wanted)
            self._codes.add(code)
        self._frames.start(sys._getframe(1))
        return None

    def _instruction(self, code: CodeType, offset: int) -> None:
        self._frames.instruction(sys._getframe(1), offset)

    def _return(self, code: CodeType, offset: int, value: Any) -> None:
        self._frames.leave(sys._getframe(1), value, True)

    def _yield(self, code: CodeType, offset: int, value: Any) -> None:
        self._frames.leave(sys._getframe(1), value, False)


_STDLIB = sysconfig.get_paths()["stdlib"]
_FOLLOWED_IN_STDLIB = ("contextlib", "dataclasses", "functools", "copy", "types", "statistics")
# Libraries that torch calls while it traces.
_NOT_FOLLOWED = frozenset((
    "_distutils_hack", "typing_extensions.py", "sympy", "numpy", "jax", "jaxlib", "networkx",
    "setuptools", "mpmath", "onnx", "onnxruntime", "openvino", "_pytest", "pluggy",
))  # fmt: skip
_PACKAGE = str(Path(__file__).parents[3])


def is_helper(frame: FrameType) -> bool:
    """Whether a frame's function is followed only where user code calls it.

    Functions of Python's library are, and those that a library makes of text, as dataclasses do.
    """
    file = frame.f_code.co_filename
    if not file.startswith("<"):
        return file.startswith(_STDLIB + os.sep) and "site-packages" not in file
    module = str(frame.f_globals.get("__name__", "")).split(".")[0]
    is_typed_in = module not in sys.stdlib_module_names or module == "__main__"
    return not is_typed_in or module in _LIBRARIES_IN_TEXT or file.startswith("<eval_with_key>")


_LIBRARIES_IN_TEXT = ("", "torch", "dynamo_backends", "numpy", "sympy", "jax")


def is_user_code(file: str, libraries: tuple[str, ...]) -> bool:
    """Whether a file holds neither torch's code, nor Python's, nor this package's.

    Args:
        file: Its path.
        libraries: Folders of torch.
    """
    if file.startswith("<frozen"):
        return False
    if file.startswith((*libraries, _PACKAGE)) or not _NOT_FOLLOWED.isdisjoint(Path(file).parts):
        return False
    if not file.startswith(_STDLIB + os.sep) or "site-packages" in file:
        return True
    return Path(file).stem in _FOLLOWED_IN_STDLIB

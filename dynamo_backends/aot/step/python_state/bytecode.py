"""A shadow of CPython's value stack: which objects each instruction of a followed frame works on.

CPython's tracing hook says which instruction comes next and what the local variables are, but not
what is on the stack. Most operands are known all the same: names, attributes and items of known
objects, constants, and what followed functions returned. Everything else is `UNKNOWN`, which an
`Observer` has to treat as any object that it knows.

Instructions are those of CPython 3.11 to 3.13 (https://docs.python.org/3/library/dis.html); one
that has no rule here keeps the stack's depth by `dis.stack_effect` and leaves unknown values.
"""

import dis
import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any


class _Mark:
    def __init__(self, name: str):
        self._name = name

    def __repr__(self) -> str:
        return self._name


UNKNOWN: Any = _Mark("UNKNOWN")
"""A value that the shadow does not know."""

NULL: Any = _Mark("NULL")
"""What CPython pushes beside a callable that is not a method."""


@dataclass(frozen=True, eq=False)
class Method:
    """A method that was looked up to be called: of which object, its name, and its value."""

    owner: Any
    name: str
    value: Any


class Observer:
    """What is told of the instructions of followed frames, before each is executed.

    Methods that return a value say what the instruction will push, or `UNKNOWN`.
    """

    def load_global(self, frame: FrameType, name: str) -> Any:
        """A global name is read; builtins are not reported."""
        raise NotImplementedError

    def load_cell(self, frame: FrameType, name: str) -> Any:
        """A variable of an enclosing function is read."""
        raise NotImplementedError

    def load_attribute(self, frame: FrameType, owner: Any, name: str) -> Any:
        """An attribute is read; the owner may be `UNKNOWN`."""
        raise NotImplementedError

    def load_item(self, frame: FrameType, container: Any, key: Any) -> Any:
        """An item is read; both may be `UNKNOWN`."""
        raise NotImplementedError

    def contents(self, frame: FrameType, container: Any) -> None:
        """All of an object's items may be read: by iteration, comparison, a test, or in C."""
        raise NotImplementedError

    def store_attribute(self, frame: FrameType, owner: Any, name: str) -> None:
        """An attribute is written or deleted."""
        raise NotImplementedError

    def store_item(self, frame: FrameType, container: Any, key: Any) -> None:
        """An item is written or deleted."""
        raise NotImplementedError

    def store_global(self, frame: FrameType, name: str) -> None:
        """A global name is written or deleted."""
        raise NotImplementedError

    def store_cell(self, frame: FrameType, name: str) -> None:
        """A variable of an enclosing function is written or deleted."""
        raise NotImplementedError

    def call(self, frame: FrameType, function: Any, args: list[Any]) -> Any:
        """Something is called: a `Method`, another callable, or `UNKNOWN`."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Instruction:
    name: str
    arg: int
    value: Any
    opcode: int
    following: int


@dataclass(frozen=True)
class _Handler:
    start: int
    end: int
    depth: int
    pushed: int


_NOT_AN_INSTRUCTION = ("CACHE", "EXTENDED_ARG")


@functools.lru_cache(maxsize=4096)
def _decode(code: CodeType) -> tuple[dict[int, _Instruction], dict[int, list[_Handler]]]:
    """A code object's instructions by offset, and what its exception handlers find on the stack."""
    listed = [i for i in dis.get_instructions(code) if i.opname != "CACHE"]
    table: dict[int, _Instruction] = {}
    waiting: list[int] = []
    for number, each in enumerate(listed):
        if each.opname in _NOT_AN_INSTRUCTION:
            waiting.append(each.offset)
            continue
        after = listed[number + 1].offset if number + 1 < len(listed) else -1
        arg = each.arg if each.arg is not None else 0
        instruction = _Instruction(each.opname, arg, each.argval, each.opcode, after)
        for offset in (*waiting, each.offset):
            table[offset] = instruction
        waiting.clear()
    handlers: dict[int, list[_Handler]] = {}
    for entry in dis.Bytecode(code).exception_entries:  # type: ignore[attr-defined]
        pushed = 2 if entry.lasti else 1
        handler = _Handler(entry.start, entry.end, entry.depth, pushed)
        handlers.setdefault(entry.target, []).append(handler)
    return table, handlers


class ShadowStack:
    """The shadow of one frame's stack.

    Args:
        observer: What is told of its instructions.
        code: The frame's.
    """

    def __init__(self, observer: Observer, code: CodeType):
        self._observer = observer
        self._table, self._handlers = _decode(code)
        self._stack: list[Any] = []
        self._last: _Instruction | None = None
        self._last_offset = -1
        self._pushes: list[Any] | None = None
        self.returned: Any = UNKNOWN
        self.callee: Any = UNKNOWN

    def before(self, frame: FrameType, offset: int) -> None:
        """Takes note of the instruction that a frame executes next."""
        instruction = self._table.get(offset)
        if instruction is None or (instruction is self._last and offset > self._last_offset):
            return
        self._finish(offset)
        self._last, self._last_offset = instruction, offset
        self._pushes, self.returned, self.callee = None, UNKNOWN, UNKNOWN
        rule = _RULES.get(instruction.name)
        if rule is not None:
            rule(self, frame, instruction)
        elif instruction.name not in _TAKES_NOTHING:
            self._report_operands(frame, instruction)

    def _finish(self, offset: int) -> None:
        """Gives the stack what the last instruction left there."""
        last = self._last
        if last is None:
            return
        handlers = self._handlers.get(offset)
        if handlers is not None and offset != last.following:
            for handler in handlers:
                if handler.start <= self._last_offset < handler.end:
                    del self._stack[handler.depth :]
                    self._stack += [UNKNOWN] * (handler.depth + handler.pushed - len(self._stack))
                    return
        if self._pushes is not None:
            self._stack += iter(self._pushes)
            return
        jumped = offset != last.following
        if last.name == "FOR_ITER":
            if jumped:
                self._pop(1)
            else:
                self._stack.append(UNKNOWN)
            return
        self._generic(last, jumped)

    def _generic(self, last: _Instruction, jumped: bool) -> None:
        arg = last.arg if last.opcode >= dis.HAVE_ARGUMENT else None
        effect = dis.stack_effect(last.opcode, arg, jump=jumped)
        if effect > 0:
            self._forget_top(last)
            self._stack += [UNKNOWN] * effect
            return
        self._pop(-effect)
        self._forget_top(last)

    def _forget_top(self, last: _Instruction) -> None:
        if self._stack and last.name not in _KEEPS_TOP:
            self._stack[-1] = self.returned

    def _report_operands(self, frame: FrameType, instruction: _Instruction) -> None:
        """An instruction without a rule may read all of what it takes."""
        arg = instruction.arg if instruction.opcode >= dis.HAVE_ARGUMENT else None
        count = max(1, 1 - dis.stack_effect(instruction.opcode, arg, jump=False))
        for value in self._stack[-count:]:
            self._observer.contents(frame, value)

    def _pop(self, count: int) -> list[Any]:
        if not count:
            return []
        taken = self._stack[-count:]
        del self._stack[-count:]
        return [UNKNOWN] * (count - len(taken)) + taken


Rule = Callable[[ShadowStack, FrameType, _Instruction], None]
_RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


# What neither reads its operands nor changes what lies below them.
_KEEPS_TOP = frozenset((
    "POP_TOP", "POP_EXCEPT", "STORE_FAST", "STORE_NAME", "STORE_DEREF", "STORE_GLOBAL",
    "STORE_FAST_STORE_FAST", "STORE_FAST_MAYBE_NULL", "DELETE_FAST", "DELETE_NAME",
    "DELETE_DEREF", "DELETE_GLOBAL", "POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE", "POP_JUMP_IF_NONE",
    "POP_JUMP_IF_NOT_NONE", "POP_JUMP_FORWARD_IF_TRUE", "POP_JUMP_FORWARD_IF_FALSE",
    "POP_JUMP_FORWARD_IF_NONE", "POP_JUMP_FORWARD_IF_NOT_NONE", "POP_JUMP_BACKWARD_IF_TRUE",
    "POP_JUMP_BACKWARD_IF_FALSE", "POP_JUMP_BACKWARD_IF_NONE", "POP_JUMP_BACKWARD_IF_NOT_NONE",
    "JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP", "JUMP_FORWARD", "JUMP_BACKWARD",
    "JUMP_BACKWARD_NO_INTERRUPT", "JUMP", "NOP", "RESUME", "MAKE_CELL", "COPY_FREE_VARS",
    "KW_NAMES", "PRECALL", "LIST_APPEND", "LIST_EXTEND", "SET_ADD", "SET_UPDATE", "MAP_ADD",
    "DICT_UPDATE", "DICT_MERGE", "RETURN_VALUE", "RETURN_CONST", "RETURN_GENERATOR", "STORE_ATTR",
    "STORE_SUBSCR", "STORE_SLICE", "DELETE_ATTR", "DELETE_SUBSCR", "SETUP_ANNOTATIONS",
    "ASYNC_GEN_WRAP", "END_FOR", "END_SEND", "RERAISE", "RAISE_VARARGS", "GEN_START",
    "INTERPRETER_EXIT", "LOAD_CLOSURE", "LOAD_ASSERTION_ERROR", "LOAD_BUILD_CLASS", "LOAD_LOCALS",
))  # fmt: skip
_READS = frozenset((
    "POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE", "POP_JUMP_FORWARD_IF_TRUE",
    "POP_JUMP_FORWARD_IF_FALSE", "POP_JUMP_BACKWARD_IF_TRUE", "POP_JUMP_BACKWARD_IF_FALSE",
    "JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP", "LIST_EXTEND", "SET_UPDATE", "DICT_UPDATE",
    "DICT_MERGE", "STORE_SLICE",
))  # fmt: skip
_READS_NOTHING = frozenset((
    "BUILD_TUPLE", "BUILD_LIST", "BUILD_SET", "BUILD_MAP", "BUILD_CONST_KEY_MAP", "BUILD_SLICE",
    "MAKE_FUNCTION", "SET_FUNCTION_ATTRIBUTE", "IS_OP", "YIELD_VALUE", "LOAD_SUPER_ATTR",
    "IMPORT_NAME", "IMPORT_FROM", "FOR_ITER", "SEND", "PUSH_EXC_INFO", "CHECK_EXC_MATCH",
    "BEFORE_WITH", "WITH_EXCEPT_START", "UNARY_NEGATIVE",
))  # fmt: skip
_TAKES_NOTHING = (_KEEPS_TOP - _READS) | _READS_NOTHING


def _local(frame: FrameType, name: str) -> Any:
    return frame.f_locals.get(name, UNKNOWN)


@_rule("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_AND_CLEAR")
def _load_fast(shadow: ShadowStack, frame: FrameType, instruction: _Instruction) -> None:
    shadow._pushes = [_local(frame, instruction.value)]


@_rule("LOAD_FAST_LOAD_FAST")
def _load_two(shadow: ShadowStack, frame: FrameType, instruction: _Instruction) -> None:
    shadow._pushes = [_local(frame, name) for name in instruction.value]


@_rule("STORE_FAST_LOAD_FAST")
def _store_and_load(shadow: ShadowStack, frame: FrameType, instruction: _Instruction) -> None:
    shadow._pop(1)
    shadow._pushes = _Local(frame, instruction.value[1])


@_rule("LOAD_CONST")
def _load_const(shadow: ShadowStack, frame: FrameType, instruction: _Instruction) -> None:
    shadow._pushes = [instruction.value]


@_rule("PUSH_NULL")
def _push_null(shadow: ShadowStack, frame: FrameType, instruction: _Instruction) -> None:
    shadow._pushes = [NULL]


@_rule("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
def _load_global(shadow: ShadowStack, frame: FrameType, instruction: _Instruction) -> None:
    name = instruction.value
    if instruction.name == "LOAD_FROM_DICT_OR_GLOBALS":
        shadow._pop(1)
    if instruction.name != "LOAD_GLOBAL" and name in frame.f_locals:
        value = frame.f_locals[name]
    elif name in frame.f_globals:
        value = shadow._observer.load_global(frame, name)
    else:
        value = frame.f_builtins.get(name, UNKNOWN)
    has_null = instruction.name == "LOAD_GLOBAL" and instruction.arg & 1
    pair = [value, NULL] if sys.version_info >= (3, 13) else [NULL, value]
    shadow._pushes = pair if has_null else [value]


@_rule("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
def _load_deref(shadow: ShadowStack, frame: FrameType, instruction: _Instruction) -> None:
    if instruction.name == "LOAD_FROM_DICT_OR_DEREF":
        shadow._pop(1)
    name = instruction.value
    if name in frame.f_code.co_freevars:
        shadow._pushes = [shadow._observer.load_cell(frame, name)]
    else:
        shadow._pushes = [_local(frame, name)]


@_rule("LOAD_ATTR", "LOAD_METHOD")
def _load_attr(shadow: ShadowStack, frame: FrameType, instruction: _Instruction) -> None:
    (owner,) = shadow._pop(1)
    value = shadow._observer.load_attribute(frame, owner, instruction.value)
    is_call = instruction.name == "LOAD_METHOD" or (
        sys.version_info >= (3, 12) and instruction.arg & 1
    )
    if is_call:
        method = Method(owner, instruction.value, value)
        shadow._pushes = [method, method]
    else:
        shadow._pushes = _Result(shadow, value)


class _Result(list[Any]):
    """What a followed function returns, if the shadow knows no better."""

    def __init__(self, shadow: ShadowStack, value: Any):
        super().__init__([value])
        self._shadow = shadow

    def __iter__(self) -> Any:
        value = self[0]
        return iter([self._shadow.returned if value is UNKNOWN else value])


class _Local(list[Any]):
    """A local variable, as it is after the instruction."""

    def __init__(self, frame: FrameType, name: str):
        super().__init__()
        self._frame, self._name = frame, name

    def __iter__(self) -> Any:
        return iter([_local(self._frame, self._name)])


@_rule("BINARY_SUBSCR")
def _subscript(shadow: ShadowStack, frame: FrameType, instruction: _Instruction) -> None:
    container, key = shadow._pop(2)
    shadow._pushes = _Result(shadow, shadow._observer.load_item(frame, container, key))


@_rule("UNPACK_SEQUENCE")
def _unpack(shadow: ShadowStack, frame: FrameType, instruction: _Instruction) -> None:
    (sequence,) = shadow._pop(1)
    shadow._observer.contents(frame, sequence)
    is_known = type(sequence) in (tuple, list) and len(sequence) == instruction.arg
    shadow._pushes = [*reversed(sequence)] if is_known else [UNKNOWN] * instruction.arg


@_rule("COPY")
def _copy(shadow: ShadowStack, frame: FrameType, instruction: _Instruction) -> None:
    known = len(shadow._stack) >= instruction.arg
    shadow._pushes = [shadow._stack[-instruction.arg] if known else UNKNOWN]


@_rule("SWAP")
def _swap(shadow: ShadowStack, frame: FrameType, instruction: _Instruction) -> None:
    stack = shadow._stack
    if len(stack) >= instruction.arg:
        stack[-1], stack[-instruction.arg] = stack[-instruction.arg], stack[-1]
    shadow._pushes = []


@_rule("STORE_ATTR")
def _store_attr(shadow: ShadowStack, frame: FrameType, instruction: _Instruction) -> None:
    _, owner = shadow._pop(2)
    shadow._observer.store_attribute(frame, owner, instruction.value)
    shadow._pushes = []


@_rule("DELETE_ATTR")
def _delete_attr(shadow: ShadowStack, frame: FrameType, instruction: _Instruction) -> None:
    (owner,) = shadow._pop(1)
    shadow._observer.store_attribute(frame, owner, instruction.value)
    shadow._pushes = []


@_rule("STORE_SUBSCR", "DELETE_SUBSCR")
def _store_item(shadow: ShadowStack, frame: FrameType, instruction: _Instruction) -> None:
    operands = shadow._pop(3 if instruction.name == "STORE_SUBSCR" else 2)
    shadow._observer.store_item(frame, operands[-2], operands[-1])
    shadow._pushes = []


@_rule("STORE_SLICE")
def _store_slice(shadow: ShadowStack, frame: FrameType, instruction: _Instruction) -> None:
    _, container, *_ = shadow._pop(4)
    shadow._observer.store_item(frame, container, slice(None))
    shadow._pushes = []


@_rule("STORE_GLOBAL", "DELETE_GLOBAL")
def _store_global(shadow: ShadowStack, frame: FrameType, instruction: _Instruction) -> None:
    shadow._pop(1 if instruction.name == "STORE_GLOBAL" else 0)
    shadow._observer.store_global(frame, instruction.value)
    shadow._pushes = []


@_rule("STORE_DEREF", "DELETE_DEREF")
def _store_deref(shadow: ShadowStack, frame: FrameType, instruction: _Instruction) -> None:
    shadow._pop(1 if instruction.name == "STORE_DEREF" else 0)
    if instruction.value in frame.f_code.co_freevars:
        shadow._observer.store_cell(frame, instruction.value)
    shadow._pushes = []


@_rule("PRECALL", "KW_NAMES")
def _nothing(shadow: ShadowStack, frame: FrameType, instruction: _Instruction) -> None:
    shadow._pushes = []


@_rule("CALL", "CALL_KW")
def _call(shadow: ShadowStack, frame: FrameType, instruction: _Instruction) -> None:
    if instruction.name == "CALL_KW":
        shadow._pop(1)
    args = shadow._pop(instruction.arg)
    _report_call(shadow, frame, shadow._pop(2), args)


@_rule("CALL_FUNCTION_EX")
def _call_ex(shadow: ShadowStack, frame: FrameType, instruction: _Instruction) -> None:
    args = shadow._pop(1 + (instruction.arg & 1))
    for each in args:
        shadow._observer.contents(frame, each)
    _report_call(shadow, frame, shadow._pop(2), [UNKNOWN])


def _report_call(shadow: ShadowStack, frame: FrameType, pair: list[Any], args: list[Any]) -> None:
    known = [x for x in pair if x is not NULL and x is not UNKNOWN]
    methods = [x for x in known if isinstance(x, Method)]
    shadow.callee = (methods or known or [UNKNOWN])[0]
    result = shadow._observer.call(frame, shadow.callee, args)
    shadow._pushes = _Result(shadow, result)


def look_up(owner: Any, name: str) -> Any:
    """An attribute's value, if finding it executes no code of the owner's; else `UNKNOWN`."""
    try:
        found = inspect.getattr_static(owner, name)
    except AttributeError:
        return UNKNOWN
    kind = type(found)
    if hasattr(kind, "__get__"):
        return UNKNOWN
    return found

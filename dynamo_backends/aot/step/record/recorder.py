"""Records the torch calls of a step while they are executed in eager."""

import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dynamo_backends._torch_private import is_in_ddp_forward, storage_id
from dynamo_backends.aot.step.backward.checkpoints import is_of_region
from dynamo_backends.aot.step.backward.hooks import is_hooked
from dynamo_backends.aot.step.backward.tape import (
    attach_function_node,
    begin_backward,
    resume_backward,
)
from dynamo_backends.aot.step.record import handlers
from dynamo_backends.aot.step.record.interpreter import freed_by_backward
from dynamo_backends.aot.step.record.placeholders import TensorSpec
from dynamo_backends.aot.step.record.segment import Segment
from dynamo_backends.aot.step.record.templates import (
    Items,
    NotRecordable,
    Ref,
    leaves,
    refs,
    template_of,
)
from dynamo_backends.aot.step.record.trie import VARYING, Entry, Flags, torch_state
from dynamo_backends.aot.step.source_lines import describe_line, name_of, user_frame
from dynamo_backends.interface.errors import DynamoBackendsError

_PLAIN = (bool, int, float, str)
COMMUNICATES = "communicates with other processes (torch.distributed, {})"


class UnrecordableCallError(DynamoBackendsError):
    """Raised for a call that no program can contain; the step goes on in eager."""


class Recorder:
    """Records the torch calls of a step while they run in eager.

    Attributes:
        natives: Functions that have to do with no tensors.
    """

    natives: ClassVar[set[Any]] = set()

    def __init__(self, session: Any):
        self._session = session

    @staticmethod
    def line() -> str:
        """Returns the user's line, for people."""
        frame: FrameType | None = user_frame() or sys._getframe(1)
        assert frame is not None
        return describe_line(frame.f_code.co_filename, frame.f_lineno)

    def record(self, kind: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Executes a call, and adds it to the record.

        Raises:
            Refusal: No record can hold it; it has not been executed.
        """
        segment: Segment = self._session.segment
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if kind == "backward":
            return self._record_backward(func, args, kwargs)
        self._check(segment, func, kwargs, tensors)
        given = self._templates(segment, func, args, kwargs, tensors)
        if given is None:
            if not tensors:
                self.natives.add(func)
            return self._session.data(func(*args, **kwargs))
        before = dict(_results(segment, tensors))
        flags = {n: _flags(t) for n, t in before.items()}
        specs = {n: TensorSpec.of(t) for n, t in before.items()}
        state = torch_state()
        with Observer() as observer:
            result = func(*args, **kwargs)
        if observer.communicates:
            self._session.go_eager(COMMUNICATES.format(name_of(func)))
            return result
        if (
            observer.reads
            and kind == "call"
            and not handlers.only_checks_values(func, args, kwargs)
        ):
            if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
                self._session.go_eager(
                    f"calls {name_of(func)}, whose result depends on tensor values"
                )
                return result
            kind = "read"
        made, template = self._result(segment, result, kind)
        if not tensors and not refs(template) and kind != "mark":
            self.natives.add(func)
            return result
        if kind == "call" and result is not None and not refs(template) and [*leaves(template)]:
            kind = "read"
        entry = Entry(
            kind, func, *given, template, state, self.line(), made,
            mutates=observer.mutates or kind == "set_grad" or func is attach_function_node,
            draws=observer.draws,
            flags=tuple((n, _flags(t)) for n, t in before.items() if _flags(t) != flags[n]),
        )  # fmt: skip
        entry.gradients.update(self._gradients_set(kind, given[0], template))
        numbers = (*refs(given[0]), *refs(given[1]))
        if kind == "read" and type(result) in _PLAIN:
            is_constant = segment.trie.is_constant(segment.node, numbers)
            entry.value = result if is_constant else VARYING
        if any(_moved(specs[n], t) for n, t in before.items()):  # it has to run at each call
            self._session.go_eager(f"changes the shape of a tensor in place ({name_of(func)})")
            return result
        self._append(segment, entry)
        if kind == "read" and entry.value is VARYING:
            self._session.after_read(segment.node)
        return result

    def _check(self, segment: Segment, func: Any, kwargs: Any, tensors: list[Tensor]) -> None:
        if not is_of_region(torch_state()[1]):
            raise UnrecordableCallError("uses saved-tensor hooks")
        if is_in_ddp_forward():
            raise UnrecordableCallError(
                "calls a module in DistributedDataParallel, which averages gradients between "
                "processes in C++,"
            )
        if str(getattr(func, "__module__", None)).startswith("torch.distributed."):
            raise UnrecordableCallError(COMMUNICATES.format(name_of(func)))
        if kwargs.get("generator") is not None and tensors:
            raise UnrecordableCallError(
                f"draws random numbers from a non-default generator ({name_of(func)})"
            )
        for tensor in tensors:
            number = segment.number_of(tensor)
            is_new = number is None or segment.trie.kinds[number] == "input"
            if is_new and not tensor.is_leaf and not segment.is_freed(tensor):
                raise UnrecordableCallError(
                    "uses a non-leaf tensor whose autograd graph was created before the step"
                )
        is_setter = func in (handlers.SET_DATA, handlers.SET_REQUIRES_GRAD) or (
            func is torch.Tensor.requires_grad_
        )
        if is_setter:
            number = segment.ref(tensors[0]).value
            is_data = func == handlers.SET_DATA
            if segment.trie.kinds[number] != ("slot" if is_data else "result"):
                raise UnrecordableCallError(f"sets an attribute of a tensor ({name_of(func)})")

    def _templates(
        self, segment: Segment, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]
    ) -> tuple[Items, Items] | None:
        """Templates of the arguments; None for a call that is executed at each step."""
        if kwargs.get("generator") is not None:
            return None
        try:
            given = template_of(tuple(args), segment.ref), template_of(dict(kwargs), segment.ref)
        except NotRecordable as error:
            if not tensors:
                return None
            raise UnrecordableCallError(f"calls {name_of(func)} with {error}") from None
        return given

    def _result(self, segment: Segment, result: Any, kind: str) -> tuple[tuple[int, ...], Any]:
        first = len(segment.trie.specs)
        if kind == "read":
            return (), None
        try:
            template = template_of(result, segment.result)
        except NotRecordable:
            return (), None
        if kind == "get_grad" and type(template) is Ref and template.value >= first:
            segment.trie.kinds[template.value] = "gradient"
            segment.trie.inputs.append(template.value)
        made = tuple(n for n in refs(template) if n >= first)
        return made, template

    @staticmethod
    def _gradients_set(kind: str, args: Items, result: Any) -> dict[int, int | None]:
        if kind == "get_grad":
            return {args.items[0].value: result.value}
        if kind != "set_grad":
            return {}
        value = args.items[1]
        return {args.items[0].value: None if value is None else value.value}

    def _append(
        self, segment: Segment, entry: Entry, consumed: frozenset[int] = frozenset()
    ) -> None:
        trie, parent = segment.trie, segment.node
        new = {n for n in entry.made if not trie.specs[n].is_leaf}
        new |= {n for n, (requires, leaf) in entry.flags if requires and not leaf}
        if entry.function is torch.autograd.grad and not _retains(entry):
            roots = refs(entry.args)
            consumed = frozenset(freed_by_backward(parent.path(), roots, parent.history)) - set(
                entry.made
            )
        segment.node = trie.append(parent, entry, (parent.history | new) - consumed)

    def _record_backward(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        segment: Segment = self._session.segment
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self._check(segment, func, kwargs, tensors)
        given = self._templates(segment, func, args, kwargs, tensors)
        assert given is not None
        leaves = dict(_leaves(segment))
        if func not in (begin_backward, resume_backward) and any(map(is_hooked, leaves.values())):
            raise UnrecordableCallError("has hooks in its backward pass")
        before = {n: t.grad for n, t in leaves.items()}
        state = torch_state()
        with Observer() as observer:
            result = func(*args, **kwargs)
        made: list[int] = []
        template = None
        if result is not None:
            computed, template = self._result(segment, result, "call")
            made += computed
        entry = Entry("backward", func, *given, template, state, self.line(), mutates=True)
        entry.draws = observer.draws
        for number, tensor in leaves.items():
            gradient = tensor.grad
            if gradient is not before[number] and gradient is not None:
                new = segment.result(gradient).value
                made += [] if new in segment.node.known else [new]
                entry.gradients[number] = new
        told = {n for before_it in segment.node.path() for n in before_it.gradients}
        entry.made = tuple(made)
        if func is not resume_backward:
            entry.absent = tuple(n for n, g in before.items() if n not in told and g is None)
            entry.present = tuple(n for n, g in before.items() if n not in told and g is not None)
        consumed: frozenset[int] = frozenset()
        if func is not resume_backward and not _retains(entry):
            node = segment.node
            consumed = frozenset(freed_by_backward(node.path(), refs(given[0]), node.history))
        self._append(segment, entry, consumed)
        return result

    def record_optimizer(
        self, kind: str, optimizer: Any, args: Any, kwargs: Any, run: Any, settings: Any
    ) -> Any:
        """Executes a call of an optimizer, and adds it to the record as one.

        Args:
            kind: "optimizer" or "zero_grad".
            optimizer: The optimizer.
            args: Arguments of the call.
            kwargs: Keyword arguments.
            run: Executes it.
            settings: The optimizer's settings that are not inputs.
        """
        segment: Segment = self._session.segment
        given = template_of(tuple(args), segment.ref), template_of(dict(kwargs), segment.ref)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        entry = Entry(
            kind, (kind, optimizer, settings), *given, None, torch_state(), self.line(),
            mutates=True,
        )  # fmt: skip
        result = run()
        if kind == "zero_grad":
            numbers = [segment.ref(p).value for p in parameters]
            if all(p.grad is None for p in parameters):
                entry.gradients.update(dict.fromkeys(numbers))
        self._append(segment, entry)
        return result


def _results(segment: Segment, tensors: list[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Returns those of the tensors that are results of recorded calls."""
    for tensor in tensors:
        number = segment.number_of(tensor)
        if number is not None and segment.trie.kinds[number] == "result":
            yield number, tensor


def _leaves(segment: Segment) -> Iterator[tuple[int, Tensor]]:
    """The tensors that a backward pass may give gradients."""
    for number in segment.node.known:
        tensor = segment.real(number)
        if tensor is not None and tensor.requires_grad and tensor.is_leaf:
            yield number, tensor


def _retains(entry: Entry) -> bool:
    """Returns whether a backward pass keeps the history that it goes through."""
    given = dict(zip(entry.kwargs.keys, entry.kwargs.items, strict=True))
    first = 2 if entry.function in handlers.BACKWARD else 3
    retain, create = (*entry.args.items[first : first + 2], None, None)[:2]
    return bool(given.get("retain_graph", retain) or given.get("create_graph", create))


def _flags(tensor: Tensor) -> Flags:
    return tensor.requires_grad, tensor.is_leaf


def _moved(before: TensorSpec, tensor: Tensor) -> bool:
    now = TensorSpec.of(tensor)
    return (now.size, now.stride, now.dtype) != (before.size, before.stride, before.dtype)


_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional", "_dtensor")


class Observer(TorchDispatchMode):
    """Watches the operators of one call.

    Attributes:
        mutates: Whether one writes to a tensor that was there before the call.
        draws: Whether one draws random numbers.
        reads: Whether a shape, or Python code, depends on the contents of a tensor.
        communicates: Whether one talks to other processes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mutates = self.draws = self.reads = self.communicates = False
        self._new: set[int | None] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Executes an operator and records it."""
        kwargs = kwargs or {}
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        self.reads |= _depends_on_data(func, args)
        self.communicates |= func.namespace in _COLLECTIVES
        if func._schema.is_mutable:
            written = map(storage_id, _written(func, args, kwargs))
            self.mutates |= any(storage not in self._new for storage in written)
        result = func(*args, **kwargs)
        given = set(map(storage_id, _tensors((args, kwargs))))
        self._new.update(set(map(storage_id, _tensors(result))) - given)
        return result


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from _tensors(value)


def _depends_on_data(func: Any, args: tuple[Any, ...]) -> bool:
    """Returns whether a result's shape or value in Python follows from contents."""
    if func is torch.ops.aten.index.Tensor:  # of integers it does not
        return any(x.dtype in (torch.bool, torch.uint8) for x in _tensors(args[1]))
    tags = func.tags
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags

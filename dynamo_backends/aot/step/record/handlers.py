"""What a session does at functions of torch that are more, or less, than a call of the record."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dynamo_backends._torch_private import note_registrations
from dynamo_backends._torch_private.functorch import change_metadata
from dynamo_backends._torch_private.placeholders import contents_of
from dynamo_backends.aot.step.backward import checkpoints, tape
from dynamo_backends.aot.step.backward.generator_states import keep_state, use_state
from dynamo_backends.aot.step.record import functions
from dynamo_backends.aot.step.record.placeholders import is_placeholder
from dynamo_backends.aot.step.source_lines import name_of


def native(session: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Executes a call that is no part of the record."""
    return func(*args, **kwargs)


def _flag(position: int) -> Callable[..., Any]:
    def read(session: Any, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        if not is_placeholder(tensor):
            return func(*args)
        segment, number = session.segment, tensor.step_value
        spec = segment.trie.specs[number]
        return segment.flags.get(number, (spec.requires_grad, spec.is_leaf))[position]

    return read


def _read_value(session: Any, func: Any, args: Any, kwargs: Any) -> Any:
    if all(
        session.segment.is_untouched(x)
        for x in pytree.tree_leaves((args, kwargs))
        if isinstance(x, Tensor)
    ):
        session.note_read(func)
        if session.replaying and session.segment.writes_to_memory_of(args):
            session.cut("reads memory that it writes to")
        return func(*args, **kwargs)
    return session.call("read", func, args, kwargs)


def _read_history(session: Any, func: Any, args: Any, kwargs: Any) -> Any:
    context = session.nested.context_of(args[0])
    if context is not None:
        return context
    if not session.segment.is_result(args[0]):
        return func(*args, **kwargs)
    requires_grad = _flag(0)(session, functions.REQUIRES_GRAD, args, kwargs)
    if not requires_grad or _flag(1)(session, functions.IS_LEAF, args, kwargs):
        return None
    return session.nested.node_of(args[0])


def _refuse(session: Any, func: Any, args: Any, kwargs: Any) -> Any:
    session.go_eager(functions.REFUSED[func])
    return func(*args, **kwargs)


def _register_hook(session: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Those of results and of leaves that were there before are called in backward passes."""
    segment, tensor = session.segment, args[0]
    is_leaf = _flag(1)(session, functions.IS_LEAF, (tensor,), {})
    if func is functions.HOOKS[0] and not is_leaf and segment.is_result(tensor):
        return session.nested.add_hook(*args, **kwargs)
    if is_placeholder(tensor) or not tensor.is_leaf or segment.is_result(tensor):
        session.go_eager("registers a hook on a tensor")
    note_registrations()  # backward passes look at all leaves
    return func(*args, **kwargs)


def _retain_grad(session: Any, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    is_leaf = _flag(1)(session, functions.IS_LEAF, (tensor,), {})
    if is_leaf and _flag(0)(session, functions.REQUIRES_GRAD, (tensor,), {}):
        return None  # it has one anyway
    if is_leaf or not session.segment.is_result(tensor):
        return func(*args, **kwargs)
    return session.nested.retain(tensor)


def _data(session: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Python's data become tensors, which are inputs; unless tensors are among them."""
    if any(is_placeholder(x) for x in pytree.tree_leaves((args, kwargs))):
        return session.call("read", func, args, kwargs)
    return session.data(func(*args, **kwargs))


def _get_grad(session: Any, func: Any, args: Any, kwargs: Any) -> Any:
    segment = session.segment
    number = segment.number_of(args[0])
    if session.replaying and number is not None and number in segment.gradients:
        gradient = segment.gradients[number]
        return None if gradient is None else segment.trie.value(gradient)
    if is_placeholder(args[0]):
        return None
    gradient = func(*args)
    if gradient is None or (not session.replaying and segment.number_of(gradient) is not None):
        return gradient
    return session.call("get_grad", func, args, kwargs)


def _as(kind: str) -> Callable[..., Any]:
    """Returns a handler: the function is a call of the record of another kind."""
    return lambda session, func, args, kwargs: session.call(kind, func, args, kwargs)


def _set_flag(session: Any, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, flag = args[0], (*args[1:], *kwargs.values(), True)[0]
    if is_placeholder(tensor):
        is_same = _flag(0)(session, functions.REQUIRES_GRAD, (tensor,), {}) is flag
        if is_same and func is torch.Tensor.requires_grad_:
            return tensor
        return session.call("call", func, args, kwargs)
    if tensor.requires_grad is flag:
        return func(*args, **kwargs)
    if not session.replaying and session.segment.number_of(tensor) is not None:
        return session.call("call", func, args, kwargs)
    if not session.segment.is_untouched(tensor) or session.segment.lives_on(tensor):
        session.go_eager("changes requires_grad of a tensor")
    return func(*args, **kwargs)


def change_shape(session: Any, func: Any, args: Any, kwargs: Any, view: Any = None) -> Any:
    """Makes a view in place: it is a view under the same object.

    Args:
        session: The call of the step.
        func: Makes it in place.
        args: Arguments; the tensor is the first.
        kwargs: Keyword arguments.
        view: Makes the view; by default that of `CHANGES_OF_SHAPE`.
    """
    tensor, view = args[0], view or functions.CHANGES_OF_SHAPE.get(func)
    if view is None or not session.segment.is_result(tensor):
        session.go_eager(f"changes the shape of a tensor in place ({name_of(func)})")
        args = contents_of(args)
        return func(*args, **kwargs)
    result = session.call("call", view, args, kwargs)
    if is_placeholder(tensor):
        change_metadata(func, args, kwargs)
    else:
        func(*args, **kwargs)
    if session.following:
        session.segment.rename(tensor, result)
    return tensor


HANDLERS: dict[Any, Callable[[Any, Any, Any, Any], Any]] = {
    **dict.fromkeys(functions.METADATA, native),
    **dict.fromkeys(functions.BARRIERS, _read_value),
    **dict.fromkeys(functions.REFUSED, _refuse),
    **dict.fromkeys(functions.NUMBERS_OF_DATA, _data),
    **dict.fromkeys(functions.BACKWARD, lambda session, *call: session.nested.backward(*call)),
    **dict.fromkeys(functions.HOOKS, _register_hook),
    **dict.fromkeys((tape.begin, tape.proceed, tape.accumulate), _as("backward")),
    **dict.fromkeys((*checkpoints.MARKS, *tape.MARKS, keep_state, use_state), _as("mark")),
    **dict.fromkeys(functions.CHANGES_OF_SHAPE, change_shape),
    torch.Tensor.retain_grad: _retain_grad,
    functions.RETAINS_GRAD: lambda session, func, args, kwargs: (
        session.nested.retains(args[0]) or func(*args, **kwargs)
    ),
    torch.autograd.grad: lambda session, *call: session.nested.gradients(*call),
    functions.REQUIRES_GRAD: _flag(0),
    functions.IS_LEAF: _flag(1),
    functions.GRAD_FN: _read_history,
    functions.GET_GRAD: _get_grad,
    functions.SET_GRAD: _as("set_grad"),
    functions.DELETE_GRAD: lambda session, func, args, kwargs: session.call(
        "set_grad", functions.SET_GRAD, (args[0], None), {}
    ),
    functions.SET_REQUIRES_GRAD: _set_flag,
    torch.Tensor.requires_grad_: _set_flag,
}
"""What handles a function, from the session, the function and its arguments; others are calls."""

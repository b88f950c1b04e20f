"""Handles torch functions that a session does not record as one ordinary call."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dynamo_backends._torch_private import exclude_hook_registrations
from dynamo_backends._torch_private.functorch import apply_in_place_view_op
from dynamo_backends._torch_private.pending_tensors import resolve_pending, set_grad_enabled
from dynamo_backends.aot.step.backward import checkpoints, tape
from dynamo_backends.aot.step.backward.checkpoints import restore_rng_state, save_rng_state
from dynamo_backends.aot.step.record.placeholders import is_placeholder
from dynamo_backends.aot.step.source_lines import name_of

_T: Any = torch.Tensor
_B: Any = torch._C.TensorBase


def _getters(*names: str) -> set[Any]:
    return {getattr(_T, name).__get__ for name in names if hasattr(_T, name)}


def _methods(*names: str) -> set[Any]:
    return {getattr(owner, n) for n in names for owner in (_T, torch) if hasattr(owner, n)}


METADATA: frozenset[Callable[..., Any]] = frozenset(
    _getters(
        "shape", "dtype", "device", "layout", "ndim", "names", "itemsize", "nbytes", "is_sparse",
        "is_sparse_csr", "is_mkldnn", "is_quantized", "is_meta", "is_cuda", "is_cpu", "is_xpu",
        "is_mps", "is_nested", "is_vulkan", "is_maia", "is_mtia", "is_ipu", "is_xla", "name",
        "_backward_hooks", "_post_accumulate_grad_hooks",
    )
    | _methods(
        "size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "__len__",
        "is_contiguous", "is_floating_point", "is_complex", "is_signed", "storage_offset",
        "get_device", "is_conj", "is_neg", "is_inference", "dim_order", "has_names", "type",
        "result_type", "can_cast", "promote_types", "is_same_size", "__hash__", "is_pinned",
        "is_coalesced", "is_set_to", "sparse_dim", "dense_dim", "is_distributed",
    )
    | {set_grad_enabled, torch.set_grad_enabled, torch.is_tensor}
)  # fmt: skip
"""What says something of a tensor that does not depend on its contents."""

REQUIRES_GRAD: Any = _T.requires_grad.__get__
IS_LEAF: Any = _T.is_leaf.__get__
GRAD_FN: Any = _T.grad_fn.__get__
RETAINS_GRAD: Any = _T.retains_grad.__get__
GET_GRAD: Any = vars(_B)["grad"].__get__
SET_GRAD: Any = vars(_B)["grad"].__set__
DELETE_GRAD: Any = vars(_B)["grad"].__delete__
SET_DATA: Any = vars(_B)["data"].__set__
SET_REQUIRES_GRAD: Any = vars(_B)["requires_grad"].__set__

BACKWARD = (_T.backward, torch.autograd.backward)
"""Backward passes that accumulate gradients."""

BARRIERS: frozenset[Callable[..., Any]] = frozenset(
    _getters("_version", "_base", "_cdata", "output_nr")
    | _methods(
        "data_ptr", "untyped_storage", "storage", "numpy", "__array__", "__dlpack__",
        "__deepcopy__", "__reduce_ex__", "is_shared", "share_memory_", "_typed_storage",
        "set_", "resize_", "resize_as_", "tolist", "item", "is_nonzero",
        "__bool__", "__float__", "__int__", "__index__", "__complex__", "__repr__", "__format__",
        "__contains__", "equal", "allclose", "__cuda_array_interface__", "module_load",
        "__dlpack_device__", "to_dense", "apply_", "map_", "map2_",
    )
)  # fmt: skip
"""What needs the contents of a tensor, or its memory."""

VALUES: frozenset[Callable[..., Any]] = frozenset(
    _methods(
        "item", "is_nonzero", "__bool__", "__float__", "__int__", "__index__", "__complex__",
        "__contains__", "__format__", "equal", "allclose",
    )
    | _getters("_version")
)  # fmt: skip
"""Functions of `BARRIERS` that read values, one or a few."""

CHANGES_OF_SHAPE: dict[Callable[..., Any], Callable[..., Any]] = {
    getattr(_T, f"{name}_"): getattr(_T, name)
    for name in ("unsqueeze", "squeeze", "t", "transpose", "swapaxes", "swapdims")
}
"""Methods that make a view of a tensor in place, and those that return it."""

HOOKS = (_T.register_hook, _T.register_post_accumulate_grad_hook)
"""Registers a hook."""

REFUSED: dict[Callable[..., Any], str] = {
    _T.__reversed__: "calls reversed() on a tensor",
}
"""What no program of a record holds yet."""

NUMBERS_OF_DATA: frozenset[Callable[..., Any]] = frozenset(
    (torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor)
)
"""Makes tensors of Python's data; these are inputs."""

_ARITHMETIC = (
    "add", "sub", "mul", "div", "true_divide", "pow", "rsub", "__add__", "__radd__", "__sub__",
    "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__rdiv__", "__pow__",
    "__rpow__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "add_", "sub_", "mul_", "div_",
    "__lt__", "__le__", "__gt__", "__ge__", "lt", "le", "gt", "ge", "lerp", "lerp_",
)  # fmt: skip

_OPERATORS = [getattr(torch.ops.aten, n) for n in _ARITHMETIC if not n.startswith("__")]

ARITHMETIC: frozenset[Callable[..., Any]] = frozenset(
    _methods(*_ARITHMETIC)
    | {getattr(each, overload) for each in _OPERATORS for overload in each.overloads()}
)
"""Functions whose integers may become inputs; elsewhere they are sizes and dimensions."""


def only_checks_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a call reads values to refuse some, and not for its result or its shape."""
    if func is not torch.nn.functional.one_hot:
        return False
    classes: int = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
    return classes > 0


def takes_tensor(func: Any, place: tuple[int, ...]) -> bool:
    """Returns whether an operator takes a tensor where it was called with a number.

    Args:
        func: Any function.
        place: Place of the number in positional and keyword arguments.
    """
    schema = getattr(func, "_schema", None)
    if schema is None or place[0] != 0 or len(place) != 2:
        return False
    return isinstance(schema.arguments[place[1]].type, torch._C.TensorType)


def call_unrecorded(session: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function without recording it."""
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
            session.cut("reads storage that it also writes to")
        return func(*args, **kwargs)
    return session.call("read", func, args, kwargs)


def _read_history(session: Any, func: Any, args: Any, kwargs: Any) -> Any:
    context = session.nested.context_of(args[0])
    if context is not None:
        return context
    if not session.segment.is_result(args[0]):
        return func(*args, **kwargs)
    requires_grad = _flag(0)(session, REQUIRES_GRAD, args, kwargs)
    if not requires_grad or _flag(1)(session, IS_LEAF, args, kwargs):
        return None
    return session.nested.node_of(args[0])


def _refuse(session: Any, func: Any, args: Any, kwargs: Any) -> Any:
    session.go_eager(REFUSED[func])
    return func(*args, **kwargs)


def _register_hook(session: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Registers a hook of a result, or of a leaf that was there before, for backward passes."""
    segment, tensor = session.segment, args[0]
    is_leaf = _flag(1)(session, IS_LEAF, (tensor,), {})
    if func is HOOKS[0] and not is_leaf and segment.is_result(tensor):
        return session.nested.add_hook(*args, **kwargs)
    if is_placeholder(tensor) or not tensor.is_leaf or segment.is_result(tensor):
        session.go_eager("registers a hook on a tensor")
    exclude_hook_registrations()  # backward passes look at all leaves
    return func(*args, **kwargs)


def _retain_grad(session: Any, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    is_leaf = _flag(1)(session, IS_LEAF, (tensor,), {})
    if is_leaf and _flag(0)(session, REQUIRES_GRAD, (tensor,), {}):
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
        is_same = _flag(0)(session, REQUIRES_GRAD, (tensor,), {}) is flag
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
    tensor, view = args[0], view or CHANGES_OF_SHAPE.get(func)
    if view is None or not session.segment.is_result(tensor):
        session.go_eager(f"changes the shape of a tensor in place ({name_of(func)})")
        args = resolve_pending(args)
        return func(*args, **kwargs)
    result = session.call("call", view, args, kwargs)
    if is_placeholder(tensor):
        apply_in_place_view_op(func, args, kwargs)
    else:
        func(*args, **kwargs)
    if session.following:
        session.segment.rename(tensor, result)
    return tensor


HANDLERS: dict[Any, Callable[[Any, Any, Any, Any], Any]] = {
    **dict.fromkeys(METADATA, call_unrecorded),
    **dict.fromkeys(BARRIERS, _read_value),
    **dict.fromkeys(REFUSED, _refuse),
    **dict.fromkeys(NUMBERS_OF_DATA, _data),
    **dict.fromkeys(BACKWARD, lambda session, *call: session.nested.backward(*call)),
    **dict.fromkeys(HOOKS, _register_hook),
    **dict.fromkeys((tape.begin_backward, tape.resume_backward), _as("backward")),
    **dict.fromkeys(
        (*checkpoints.MARKS, *tape.MARKS, save_rng_state, restore_rng_state), _as("mark")
    ),
    **dict.fromkeys(CHANGES_OF_SHAPE, change_shape),
    torch.Tensor.retain_grad: _retain_grad,
    RETAINS_GRAD: lambda session, func, args, kwargs: (
        session.nested.retains(args[0]) or func(*args, **kwargs)
    ),
    torch.autograd.grad: lambda session, *call: session.nested.gradients(*call),
    REQUIRES_GRAD: _flag(0),
    IS_LEAF: _flag(1),
    GRAD_FN: _read_history,
    GET_GRAD: _get_grad,
    SET_GRAD: _as("set_grad"),
    DELETE_GRAD: lambda session, func, args, kwargs: session.call(
        "set_grad", SET_GRAD, (args[0], None), {}
    ),
    SET_REQUIRES_GRAD: _set_flag,
    torch.Tensor.requires_grad_: _set_flag,
}
"""What handles a function, from the session, the function and its arguments; others are calls."""

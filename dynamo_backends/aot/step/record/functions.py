"""What is special about functions of torch in a step: a row for each kind."""

from collections.abc import Callable
from typing import Any

import torch

from dynamo_backends._torch_private.placeholders import set_grad_enabled

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
    _T.__reversed__: "reverses a tensor",
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
        place: Of the number, in positional and keyword arguments.
    """
    schema = getattr(func, "_schema", None)
    if schema is None or place[0] != 0 or len(place) != 2:
        return False
    return isinstance(schema.arguments[place[1]].type, torch._C.TensorType)

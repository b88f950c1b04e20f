"""Tensors without contents that stand for results to come, and what a step does around torch calls.

| what | checked |
|---|---|
| `Tensor._make_wrapper_subclass`, `torch._C._disabled_torch_function_impl` | 2.13 |
| `torch._C._swap_tensor_impl` | 2.13 |
| `torch._C._is_any_autocast_enabled`, `torch._C._set_grad_enabled` | 2.13 |
| `torch._C`: `_len_torch_function_stack`, `_pop_torch_function_stack` | 2.13 |
| `torch._C._push_on_torch_function_stack` | 2.13 |
| `torch._tensor`: `handle_torch_function`, by which methods in Python reach a mode | 2.13 |
| `torch.utils._foreach_utils._foreach_supported_types` | 2.13; else clipping takes one by one |
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_leaves, tree_map

is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
set_grad_enabled: Any = torch._C._set_grad_enabled

function_mode_depth: Callable[[], int] = torch._C._len_torch_function_stack
pop_function_mode: Callable[[], Any] = torch._C._pop_torch_function_stack
push_function_mode: Callable[[Any], None] = torch._C._push_on_torch_function_stack

PYTHON_FUNCTIONS: tuple[Any, ...] = tuple(
    module
    for module in (torch.nn.functional, torch._tensor, torch.functional)
    if hasattr(module, "handle_torch_function")
)
"""Modules whose functions, written in Python, call `handle_torch_function` under a mode."""

_SET_CLASS: Any = vars(object)["__class__"].__set__

FOREACH_TYPES: list[type] = getattr(_foreach_utils, "_foreach_supported_types", [])
"""The classes of tensors for which torch takes lists of them at once, as in clipping."""


def pop_function_modes(depth: int) -> None:
    """Pops torch function modes until only `depth` of them are left.

    Args:
        depth: How many.
    """
    while function_mode_depth() > depth:
        torch._C._pop_torch_function_stack()


class PendingTensor(Tensor):
    """A tensor with metadata but no data yet; operators on it raise.

    `x.__class__` is Tensor, as code that asks for it expects.
    """

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Returns `Tensor`, as code that asks for the class expects."""
        return Tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuses an operator, but for those on what `materialize_pending` has left behind."""
        args, kwargs = resolve_pending((args, kwargs or {}))
        if any(issubclass(type(x), PendingTensor) for x in tree_leaves((args, kwargs))):
            raise cls.refusal(func)
        return func(*args, **kwargs)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        """Formats the tensor as an ordinary one, which it may have become."""
        return str(Tensor.__repr__(_contents_of(self), **kwargs))

    @classmethod
    def refusal(cls, func: Any) -> Exception:
        """Returns the error to raise when an operator is called on a pending tensor."""
        return NotImplementedError(f"{func} was called on a placeholder tensor, which has no data")


def make_pending_tensor(cls: type[PendingTensor], like: Any) -> Any:
    """Makes a pending tensor of a class, with the metadata of `like`.

    Args:
        cls: Its class.
        like: Has `size`, `stride`, `offset`, `dtype`, `device`, `layout` and `requires_grad`.
    """
    return Tensor._make_wrapper_subclass(
        cls,
        like.size,
        strides=like.stride,
        storage_offset=like.offset,
        dtype=like.dtype,
        device=like.device,
        layout=like.layout,
        requires_grad=False,
    )


def materialize_pending(wrapper: PendingTensor, real: Tensor) -> bool:
    """Swaps real contents into a pending tensor, which keeps its Python identity.

    Args:
        wrapper: Keeps its identity in Python.
        real: Nobody may use it afterwards.

    Returns:
        Whether something in C++, as functorch, refers to the wrapper. It has `real` then, which is
        a wrapper from now on; operators on it have the contents of the other (see
        `resolve_pending`).
    """
    swap: Any = torch._C._swap_tensor_impl
    kind = type(wrapper)
    swap(wrapper, real)
    if type(real) is not Tensor:
        vars(wrapper).update(vars(real))
    _SET_CLASS(wrapper, type(real))
    is_held = bool(real._use_count() > 1)  # type: ignore[attr-defined]
    if is_held:
        _SET_CLASS(real, kind)
        vars(real)["contents"] = wrapper
    return is_held


def resolve_pending(values: Any) -> Any:
    """Replaces pending tensors that have been materialized by their contents, in a pytree."""
    return tree_map(_contents_of, values)


def _contents_of(value: Any) -> Any:
    is_wrapper = issubclass(type(value), PendingTensor)
    return vars(value).get("contents", value) if is_wrapper else value

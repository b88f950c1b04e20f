"""torch.func's transforms: where they begin, what they wrap tensors in, the operators below them.

| what | checked |
|---|---|
| `torch._functorch.vmap`, `.eager_transforms`: `*_increment_nesting` | 2.11, 2.13, 2.15 |
| `torch._functorch.eager_transforms`: `_autograd_grad`, `_vjp_with_argnums` | 2.11, 2.13, 2.15 |
| `torch._functorch.eager_transforms`: `lazy_dynamo_disallow` | 2.11, 2.13, 2.15 |
| `torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack` | 2.11, 2.13, 2.15 |
| `torch._vmap_internals._vmap_increment_nesting` | 2.11, 2.13, 2.15 |
| `torch._C._functorch.peek_interpreter_stack` | 2.11, 2.13, 2.15 |
| `torch._C._ForceDispatchKeyGuard`, `torch._C.DispatchKey` | 2.13 |
| `torch._C._dispatch_tls_local_{in,ex}clude_set` | 2.13 |
| `torch.utils._python_dispatch._disable_current_modes` | 2.11, 2.13, 2.15 |
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, _vmap_internals
from torch._functorch import eager_transforms, vmap
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

_C: Any = torch._C
_AUTOGRAD = _C.DispatchKeySet(_C.DispatchKey.AutogradFunctionality) | _C.DispatchKeySet(
    _C.DispatchKey.ADInplaceOrView
)


def _existing(*places: tuple[Any, str]) -> tuple[tuple[Any, str], ...]:
    return tuple((module, name) for module, name in places if hasattr(module, name))


NESTINGS = _existing(
    (vmap, "vmap_increment_nesting"),
    (eager_transforms, "grad_increment_nesting"),
    (eager_transforms, "jvp_increment_nesting"),
)
"""Context managers in which transforms wrap tensors and call the user's function."""

PULLBACKS = _existing((eager_transforms, "_vjp_with_argnums"))
"""Functions that return a product with a Jacobian, to be computed later."""

GRADIENTS = _existing((eager_transforms, "_autograd_grad"))
"""Functions that run autograd's engine for transforms, also outside of the context managers."""

OTHERS = _existing(
    (eager_transforms, "_func_increment_nesting"),
    (eager_transforms, "lazy_dynamo_disallow"),
    (_vmap_internals, "_vmap_increment_nesting"),
)
"""Functions that begin functionalization, linearization and transforms of older torch."""

DUAL_LEVELS = _existing((forward_ad, "enter_dual_level"))
"""Functions that begin forward-mode autograd, within a transform or in the user's code."""


def is_transforming() -> bool:
    """Returns whether this thread is inside a torch.func transform."""
    return _C._functorch.peek_interpreter_stack() is not None


def without_autograd() -> Any:
    """Excludes autograd's dispatch keys, below the transforms (context manager)."""
    include, exclude = _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()
    return _C._ForceDispatchKeyGuard(include, exclude | _AUTOGRAD)


def with_autograd() -> Any:
    """Admits autograd's dispatch keys again inside `without_autograd` (context manager)."""
    include, exclude = _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()
    return _C._ForceDispatchKeyGuard(include, exclude - _AUTOGRAD)


@contextlib.contextmanager
def outside_transforms() -> Iterator[None]:
    """Leaves all transforms and dispatch modes; autograd is on (context manager)."""
    with temporarily_clear_interpreter_stack(), _disable_current_modes(), with_autograd():
        yield


def apply_in_place_view_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Applies an in-place view operator, such as `squeeze_`, to a wrapper's metadata.

    Args:
        func: An operator that changes a view, such as `aten.squeeze_.dims`.
        args: Its arguments; the wrapper is the first.
        kwargs: Its keyword arguments.
    """
    with _C._DisableTorchDispatch():
        func(*args, **kwargs)


def out_of_place_view_op(func: Any) -> Any:
    """Returns the overload without "_" of an in-place view operator; None if none."""
    name = func._schema.name.removeprefix("aten::").removesuffix("_")
    packet = getattr(torch.ops.aten, name, None) if func.namespace == "aten" else None
    return getattr(packet, func._overloadname, None)


def unwrapped(tensor: Tensor) -> Tensor:
    """Removes all of torch.func's wrappers from a tensor."""
    functorch: Any = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


@contextlib.contextmanager
def substituting_in_transforms(substitute: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Makes this thread's transforms wrap a tensor's substitute (context manager).

    They wrap their arguments in C++, of which torch function modes see nothing.

    Args:
        substitute: From a tensor to what stands in for it.
    """
    from torch._functorch import eager_transforms, vmap

    owners = (eager_transforms, "_wrap_for_grad"), (vmap, "_add_batch_dim")
    before = [(owner, name, getattr(owner, name)) for owner, name in owners]
    for owner, name, original in before:
        setattr(owner, name, _given(substitute, original))
    try:
        yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)


def _given(substitute: Callable[[Tensor], Tensor], original: Any) -> Callable[..., Any]:
    thread = threading.get_ident()

    def wrap(tensor: Tensor, *rest: Any) -> Any:
        if threading.get_ident() == thread:
            tensor = substitute(tensor)
        return original(tensor, *rest)

    return wrap

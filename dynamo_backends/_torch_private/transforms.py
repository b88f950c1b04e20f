"""torch.func's transforms: what they wrap tensors in, and where.

| what | checked |
|---|---|
| `torch._C._functorch`: `is_functorch_wrapped_tensor`, `get_unwrapped` | 2.13* |
| `torch._functorch`: `eager_transforms._wrap_for_grad`, `vmap._add_batch_dim` | 2.13* |
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def unwrapped(tensor: Tensor) -> Tensor:
    """Returns the tensor that torch.func's transforms have wrapped, once or several times."""
    functorch: Any = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


@contextlib.contextmanager
def transforms_given(substitute: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside: torch.func's transforms in this thread wrap what stands in for a tensor.

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

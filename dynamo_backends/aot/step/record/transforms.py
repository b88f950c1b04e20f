"""Transforms of `torch.func` in a step: the operators below them are calls of its record.

At every call functorch wraps the step's tensors, placeholders among them, and runs the user's
function on these, level by level. What has passed all levels arrives at a dispatch mode, on tensors
of the step again. There it is compared or recorded. Autograd of the step itself is left out below
the levels, and takes part where such a call is executed.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dynamo_backends._torch_private.functorch import (
    out_of_place_view_op,
    outside_transforms,
    with_autograd,
    without_autograd,
)
from dynamo_backends._torch_private.pending_tensors import resolve_pending
from dynamo_backends.aot.step.record.handlers import BARRIERS, VALUES, change_shape
from dynamo_backends.aot.step.record.placeholders import is_placeholder

_NEEDS_MEMORY = BARRIERS.difference(VALUES)


class TransformedCalls(TorchDispatchMode):
    """The part of a step that is within transforms."""

    def __init__(self, session: Any):
        super().__init__()
        self._session = session
        self._pullbacks: list[weakref.ref[Any]] = []
        self.is_open = False
        self._is_entered = False

    @property
    def holds_tensors(self) -> bool:
        """Returns whether functorch refers to tensors of the step, and may use them later."""
        return self._is_entered or any(each() is not None for each in self._pullbacks)

    def add_pullback(self, function: Callable[..., Any]) -> None:
        """Notes a function that `torch.func.vjp` has returned."""
        self._pullbacks.append(weakref.ref(function))

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        """Inside: functorch handles torch calls, and what is below is a call of the step."""
        session = self._session
        self.is_open = self._is_entered = True
        try:
            with session.handled_elsewhere(), without_autograd(), self:
                yield
        finally:
            self.is_open = self._is_entered = False

    @contextlib.contextmanager
    def _closed(self) -> Iterator[None]:
        """Inside: what is called is no part of the user's function, as on a base level."""
        self.is_open = False
        try:
            yield
        finally:
            self.is_open = True

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside: torch calls are those of the step, as outside of transforms."""
        session = self._session
        with outside_transforms(), session.handled_here(), session.innermost(), self._closed():
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Handles an operator below all levels."""
        session, kwargs = self._session, kwargs or {}
        with with_autograd(), session.aside(), self._closed():
            args, kwargs = resolve_pending((args, kwargs))
            if session.collecting or not session.following:
                return func(*args, **kwargs)
            with session.handled_here():
                return self._call(func, args, kwargs)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session, aten = self._session, torch.ops.aten
        if func is aten._efficientzerotensor.default:  # without memory; a trace has none of them
            func = aten.zeros.default
        if func is aten.detach_.default and not args[0].requires_grad:
            return args[0]  # of basis vectors, on torch 2.11
        if torch.Tag.inplace_view in func.tags:
            return change_shape(session, func, args, kwargs, out_of_place_view_op(func))
        returns = func._schema.returns
        if returns and not any("Tensor" in str(each.type) for each in returns):
            if torch.Tag.data_dependent_output in func.tags:
                return session.call("read", func, args, kwargs)
            args, kwargs = pytree.tree_map_only(Tensor, _without_contents, (args, kwargs))
            return func(*args, **kwargs)
        return session.__torch_function__(func, (), args, kwargs)

    def note_function(self, func: Any) -> None:
        """The user's function calls a torch function within a transform."""
        if func in _NEEDS_MEMORY:
            self.refuse("reads the value of a tensor inside a torch.func transform")

    def refuse(self, reason: str) -> None:
        """From here on the step runs in eager."""
        if self._session.following:
            with self.suspended():
                self._session.go_eager(reason)

    def apply(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Applies an `autograd.Function` of which functorch has called all levels."""
        args, kwargs = resolve_pending((args, kwargs))
        with self.suspended():
            return function.apply(*args, **kwargs)


def _without_contents(tensor: Tensor) -> Tensor:
    """A tensor whose metadata are the same, for an operator that depends on nothing else."""
    if not is_placeholder(tensor):
        return tensor
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=torch.device("meta")
    )

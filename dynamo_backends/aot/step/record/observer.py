"""What a recorded call does below: the operators that it consists of."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dynamo_backends._torch_private import storage_id

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
        """Executes an operator."""
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

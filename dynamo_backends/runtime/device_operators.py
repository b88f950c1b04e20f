"""Runs single operators on tensors that live on a device, outside of graphs.

Views and copies need no contents. Others run on the device if it can; else contents come to the
host, where torch computes, and a result goes back to the device when something there reads it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dynamo_backends.interface.reference import is_computing_reference
from dynamo_backends.runtime.device_values import (
    DeviceValue,
    RemoteDevice,
    attach_device_value,
    fetch_to_host,
    fills_storage,
    operator_runner,
    storage_value,
)

aten = torch.ops.aten

# What looks at shapes alone.
_BLIND = frozenset(
    getattr(aten, name).default
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
        *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided", "empty_strided"),
    )
)


def run_operator(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], home: RemoteDevice
) -> Any:
    """Runs an operator on the device if supported, else on the host.

    Args:
        func: The overload.
        args: Its arguments.
        kwargs: Likewise.
        home: The device of the handles.
    """
    if func.is_view or (func in _BLIND and not _draws(func)):
        return func(*args, **kwargs)
    if func is aten.copy_.default and _moves_array(*args):
        return args[0]
    if func is aten.clone.default and fills_storage(args[0]):
        return _cloned(args[0], kwargs)
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    results = _on_device(func, args, kwargs, tensors, home)
    if results is not NotImplemented:
        return results
    if func in _BLIND:
        return func(*args, **kwargs)
    for tensor in tensors:
        fetch_to_host(tensor)
    results = func(*args, **kwargs)
    for written in _written(func, args, kwargs):
        value = storage_value(written)
        if value is not None:
            value.mark_host_written()
    return results


def _on_device(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: Sequence[Tensor],
    home: RemoteDevice,
) -> Any:
    """Runs an operator where its tensors are; NotImplemented if that is the host."""
    compute = operator_runner(home.name)
    values = [value for x in tensors if (value := storage_value(x)) is not None]
    is_there = _draws(func) or any(v.array is not None for v in values)
    if compute is None or is_computing_reference() or not is_there:
        return NotImplemented
    if any(v.home is not home or v.is_exposed for v in values):
        return NotImplemented
    if any(storage_value(x) is None for x in _written(func, args, kwargs)):
        return NotImplemented
    return compute(func, args, kwargs)


def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _moves_array(target: Tensor, source: Tensor, *_: Any) -> bool:
    """Copies by sharing an array, which is never written to; False if that is not possible."""
    mine, its = storage_value(target), storage_value(source)
    if mine is None or its is None or its.array is None or mine is its:
        return False
    if mine.home is not its.home or target.shape != source.shape:
        return False
    if target.stride() != source.stride() or mine.dtype is not its.dtype:
        return False
    if not (fills_storage(target) and fills_storage(source)):
        return False
    its.is_shared = True
    mine.set_device_array(target, its.array, its.origin, is_shared=True)
    return True


def _cloned(source: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Returns a clone that shares the array; an ordinary one if there is none."""
    value = storage_value(source)
    layout = kwargs.get("memory_format") or torch.preserve_format
    made = torch.empty_like(source, memory_format=layout)
    if value is None or value.array is None or made.stride() != source.stride():
        return made.copy_(fetch_to_host(source))
    value.is_shared = True
    twin = DeviceValue(value.home, value.dtype, value.array, value.origin)
    twin.is_shared = True
    return attach_device_value(made, twin)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operator writes to."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[place] if place < len(args) else kwargs.get(argument.name)
        yield from (x for x in pytree.tree_leaves(given) if isinstance(x, Tensor))

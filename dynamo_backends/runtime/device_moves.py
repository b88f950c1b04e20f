"""Moves tensors to a device in place while preserving shared storage."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dynamo_backends._torch_private import has_conj_or_neg_bit
from dynamo_backends.interface.errors import DeviceError
from dynamo_backends.runtime.device_tensor import (
    DeviceTensor,
    handle_of,
    move_in_place,
    swap_in_contents,
    wrap_handle,
)
from dynamo_backends.runtime.device_values import RemoteDevice, fetch_to_host


def move_keeping_aliases(tensors: Iterable[Tensor], home: RemoteDevice | None) -> None:
    """Moves tensors in place; tensors that share storage still share it afterwards.

    Args:
        tensors: Leaves; each may occur several times.
        home: The device; None: the host.

    Raises:
        DeviceError: torch cannot exchange one, or its contents are not what its memory has.
    """
    groups: dict[int, list[Tensor]] = {}
    for tensor in {id(t): t for t in tensors}.values():
        address = handle_of(tensor).untyped_storage().data_ptr()
        groups.setdefault(address or -id(tensor), []).append(tensor)
    for group in groups.values():
        if len(group) == 1:
            move_in_place(group[0], home)
        elif _home_of(group[0]) != (None if home is None else home.name):
            _move_storage(group, home)


def _home_of(tensor: Tensor) -> str | None:
    return tensor.home if isinstance(tensor, DeviceTensor) else None


def _move_storage(tensors: Sequence[Tensor], home: RemoteDevice | None) -> None:
    handles = [fetch_to_host(handle_of(tensor)).detach() for tensor in tensors]
    lazy = next((h for h in handles if has_conj_or_neg_bit(h)), None)
    if lazy is not None:
        raise DeviceError(
            f"a tensor of shape {list(lazy.shape)} shares storage with another tensor and is its "
            "conjugate or negative view, so they cannot be moved together. Materialize it with "
            "resolve_conj().resolve_neg()."
        )
    storage = torch.UntypedStorage(handles[0].untyped_storage().nbytes())
    storage.copy_(handles[0].untyped_storage())
    for tensor, handle in zip(tensors, handles, strict=True):
        plain = torch.empty(0, dtype=handle.dtype).set_(
            storage, handle.storage_offset(), handle.shape, handle.stride()
        )
        swap_in_contents(tensor, plain if home is None else wrap_handle(plain, home.name))

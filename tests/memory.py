"""Weights and inputs in every kind of memory that users have.

A kind takes named tensors and gives tensors of the same shapes and dtypes, with the same elements
but for `tied` and `expanded`, in memory of that kind. `place_weights` gives a module such weights.
"""

import ctypes
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

Tensors = dict[str, Tensor]
Kind = Callable[[Tensors, Path], Tensors]
"""From named tensors and an empty folder to tensors of the kind."""

PAD = "!"
"""A tensor of four bytes that sorts before all others: what follows is at odd multiples of four."""


def write_safetensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes a file in which no tensor of float32 is aligned to more than four bytes."""
    plain = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file({PAD: torch.zeros(1), **plain}, path, metadata={"format": "pt"})


def _safetensors(tensors: Tensors, folder: Path) -> Tensors:
    path = folder / "model.safetensors"
    write_safetensors(tensors, path)
    loaded = safetensors.torch.load_file(path)
    return {name: loaded[name] for name in tensors}


def _saved(tensors: Tensors, folder: Path) -> Tensors:
    path = folder / "model.pt"
    torch.save(tensors, path)
    return dict(torch.load(path, mmap=True, weights_only=True))


def _sliced(memory: Callable[[int], Tensor]) -> Kind:
    """Slices of one buffer per dtype, the first of which begins at its second element."""

    def place(tensors: Tensors, folder: Path) -> Tensors:
        placed: Tensors = {}
        for dtype in {tensor.dtype for tensor in tensors.values()}:
            own = {name: t for name, t in tensors.items() if t.dtype == dtype}
            count = 1 + sum(t.numel() for t in own.values())
            flat = memory(count * dtype.itemsize).view(dtype)
            start = 1
            for name, tensor in own.items():
                part = flat[start : start + tensor.numel()].view(tensor.shape)
                placed[name] = part.copy_(tensor)
                start += tensor.numel()
        return placed

    return place


def _file_memory(size: int) -> Tensor:
    descriptor, name = tempfile.mkstemp()
    os.close(descriptor)
    try:
        return torch.from_file(name, shared=True, size=size, dtype=torch.uint8)
    finally:
        os.unlink(name)  # the mapping keeps it


def _foreign_memory(size: int) -> Tensor:
    """Memory of ctypes, of which torch knows the address only."""
    return torch.frombuffer((ctypes.c_char * size)(), dtype=torch.uint8)


def each(place: Callable[[Tensor], Tensor]) -> Kind:
    """The kind that places one tensor after the other."""
    return lambda tensors, folder: {name: place(t) for name, t in tensors.items()}


def _expanded(tensor: Tensor) -> Tensor:
    if tensor.dim() == 0 or not tensor.is_floating_point():
        return tensor.clone()
    return tensor[:1].clone().expand_as(tensor)


def _channels_last(tensor: Tensor) -> Tensor:
    order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return tensor.clone() if order is None else tensor.contiguous(memory_format=order)


def _transposed(tensor: Tensor) -> Tensor:
    return (
        tensor.mT.clone(memory_format=torch.contiguous_format).mT
        if tensor.dim() > 1
        else (tensor.clone())
    )


def _with_gaps(tensor: Tensor) -> Tensor:
    if tensor.dim() == 0:
        return tensor.clone()
    wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
    return wide[..., ::2].copy_(tensor)


def _negative(tensor: Tensor) -> Tensor:
    """The imaginary part of a conjugate, which torch negates lazily."""
    if tensor.dtype != torch.float32:
        return tensor.clone()
    return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag


def _materialized(tensor: Tensor) -> Tensor:
    return (
        torch.empty_like(tensor, device="meta").new_empty(tensor.shape, device="cpu").copy_(tensor)
    )


def _of_inference(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


def _numpy(tensor: Tensor) -> Tensor:
    array = np.empty(tensor.shape, tensor.numpy().dtype)
    np.copyto(array, tensor.numpy())
    return torch.from_numpy(array)


def _tied(tensors: Tensors, folder: Path) -> Tensors:
    """All matrices of numbers that are alike in shape and dtype are the same tensor."""
    first: dict[Any, Tensor] = {}
    placed = {name: tensor.clone() for name, tensor in tensors.items()}
    for name, tensor in placed.items():
        if tensor.dim() > 1 and tensor.is_floating_point():
            placed[name] = first.setdefault((tensor.shape, tensor.dtype), tensor)
    return placed


class NamedTensor(Tensor):
    """A subclass that computes as Tensor does, such as libraries have for what they remember."""


class NamedParameter(nn.Parameter):
    """A subclass of Parameter, such as libraries have for loading and sharding."""


UNALIGNED: dict[str, Kind] = {
    "safetensors, mapped": _safetensors,
    "slices of a flat buffer": _sliced(lambda size: torch.empty(size, dtype=torch.uint8)),
    "slices of a shared file": _sliced(_file_memory),
    "foreign memory": _sliced(_foreign_memory),
}
"""Kinds whose tensors do not begin where vector instructions can read."""

KINDS: dict[str, Kind] = {
    **UNALIGNED,
    "torch.load, mapped": _saved,
    "numpy": each(_numpy),
    "share_memory_": each(lambda t: t.clone().share_memory_()),
    "meta, materialized": each(_materialized),
    "tied": _tied,
    "expanded": each(_expanded),
    "channels last": each(_channels_last),
    "transposed": each(_transposed),
    "with gaps": each(_with_gaps),
    "negative": each(_negative),
    "inference": each(_of_inference),
    "parameter subclass": each(Tensor.clone),
    "tensor subclass": each(lambda t: t.clone().as_subclass(NamedTensor)),
}
"""All kinds; weights may be of each."""

INPUT_KINDS: dict[str, Kind] = {
    name: kind for name, kind in KINDS.items() if name not in ("tied", "parameter subclass")
}
"""Those that inputs may be of."""


def contents(module: nn.Module) -> Tensors:
    """Copies of a module's parameters and buffers, by name; a tied one has one name."""
    named = dict(module.named_parameters()) | dict(module.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in named.items()}


def place_weights(
    module: nn.Module, given: Tensors, kind: str, folder: Path, requires_grad: bool = False
) -> None:
    """Gives a module new parameters and buffers.

    Args:
        module: Changed in place; tied parameters stay tied.
        given: Of `contents`.
        kind: A name in `KINDS`.
        folder: For files.
        requires_grad: Of the parameters.
    """
    folder.mkdir(parents=True, exist_ok=True)
    placed = KINDS[kind](given, folder)
    parameter = NamedParameter if kind == "parameter subclass" else nn.Parameter
    named = dict(module.named_parameters()) | dict(module.named_buffers())
    new: dict[int, Tensor] = {}
    parameters: dict[int, Tensor] = {}  # one for each tensor: tied ones are the same
    for name, old in named.items():
        tensor = placed[name]
        if isinstance(old, nn.Parameter):
            wanted = requires_grad and tensor.is_floating_point()
            tensor = parameters.setdefault(id(tensor), parameter(tensor, requires_grad=wanted))
        new[id(old)] = tensor
    for owner in module.modules():
        for table in (owner._parameters, owner._buffers):
            for name, old in table.items():
                if old is not None:
                    table[name] = new[id(old)]


def place_inputs(given: Tensors, kind: str, folder: Path) -> Tensors:
    """Inputs in memory of a kind; as they are if inputs cannot be of it."""
    folder.mkdir(parents=True, exist_ok=True)
    return INPUT_KINDS[kind](given, folder) if kind in INPUT_KINDS else given

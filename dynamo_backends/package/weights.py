"""Weights in the safetensors format, or by name in a checkpoint beside the package."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.interface.errors import PackageError, SaveError

_CHUNK = 1 << 24  # bytes


@dataclass(frozen=True)
class Checkpoint:
    """A safetensors file that has some of the weights.

    Attributes:
        name: Of the file, beside the package.
        sha256: Of its contents.
        tensors: The names of those that the package takes from it.
    """

    name: str
    sha256: str
    tensors: tuple[str, ...]


def dumped(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, str]]:
    """Tensors as a safetensors file, and for each name under which it is there.

    Those with the same memory are stored once, row-major.

    Raises:
        SaveError: One has a dtype or layout that the format does not have.
    """
    from safetensors.torch import save

    names: dict[str, str] = {}
    stored: dict[str, Tensor] = {}
    first: dict[Any, str] = {}
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise SaveError(f"the weight {name} is {tensor.layout}; packages have strided tensors.")
        place = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        names[name] = first.setdefault(place, name) if tensor.numel() else name
        if names[name] == name:
            stored[name] = tensor.detach().cpu().contiguous()
    try:
        return save({n: t.clone() if _is_part(t) else t for n, t in stored.items()}), names
    except Exception as error:
        raise SaveError(f"the weights cannot be stored as safetensors: {error}") from error


def _is_part(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() != tensor.nbytes


def loaded(content: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file.

    Raises:
        PackageError: It is none.
    """
    from safetensors.torch import load

    try:
        return load(content) if content else {}
    except Exception as error:
        raise PackageError(f"weights cannot be read: {error}") from error


def placed(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor in memory of torch's, with the strides and on the device of another one.

    Raises:
        PackageError: Shape or dtype differ, or there is no such device.
    """
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        raise PackageError(
            f"a weight is {tensor.dtype}{list(tensor.shape)}, and the graph reads "
            f"{like.dtype}{list(like.shape)}"
        )
    try:
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        return made.copy_(tensor)
    except RuntimeError as error:
        raise PackageError(f"weights cannot be placed on {like.device}: {error}") from error


def shared_with(path: Path, tensors: Mapping[str, Tensor]) -> Checkpoint:
    """Which tensors a checkpoint has, under the same names and with the same contents.

    Raises:
        SaveError: There is none of them in the file.
    """
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            there = set(file.keys())
            same = [
                name
                for name, tensor in tensors.items()
                if name in there and _equal(file.get_tensor(name), tensor.detach().cpu())
            ]
    except Exception as error:
        raise SaveError(f"{path} cannot be read as safetensors: {error}") from error
    if not same:
        raise SaveError(
            f"{path} has none of the model's weights: names and contents must be those of "
            "its state_dict()."
        )
    return Checkpoint(path.name, file_sha256(path), tuple(same))


def _equal(stored: Tensor, tensor: Tensor) -> bool:
    same = stored.dtype == tensor.dtype and stored.shape == tensor.shape
    return same and torch.equal(stored, tensor)


def from_checkpoint(path: Path, known: Checkpoint) -> dict[str, Tensor]:
    """The tensors that a package takes from a checkpoint.

    Raises:
        PackageError: It is missing, or another one.
    """
    from safetensors import safe_open

    if not path.is_file():
        raise PackageError(
            f"the package takes weights from {known.name}, and there is no file {path}; put the "
            "checkpoint there, or name it: load(path, checkpoint=...)."
        )
    if file_sha256(path) != known.sha256:
        raise PackageError(f"{path} is not the checkpoint that the package was saved with")
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in known.tensors}


def file_sha256(path: Path) -> str:
    """A checksum of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def in_order(names: Sequence[str], known: Mapping[str, Tensor]) -> list[Tensor]:
    """Tensors by their names.

    Raises:
        PackageError: One is missing.
    """
    missing = sorted(set(names) - known.keys())
    if missing:
        raise PackageError(f"weights are missing: {', '.join(missing[:5])}")
    return [known[name] for name in names]

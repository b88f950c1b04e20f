"""Weights in the safetensors format, or by name in a checkpoint beside the package."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.graph.layouts import ALIGNMENT
from dynamo_backends.interface.errors import PackageError, SaveError, brief_error
from dynamo_backends.package.spec import Spec

_CHUNK = 1 << 24  # bytes
_LENGTH = 8  # bytes that tell the length of a safetensors file's header

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "C64": torch.complex64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Checkpoint:
    """A safetensors file that has some of the weights.

    Attributes:
        name: Name of the file, beside the package.
        sha256: Of its contents.
        tensors: The names of those that the package takes from it.
    """

    name: str
    sha256: str
    tensors: tuple[str, ...]


def dumped(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, str]]:
    """Serializes tensors to safetensors bytes; returns also the stored name of each.

    Those with the same memory are stored once, row-major.

    Raises:
        SaveError: One has a dtype or layout that the format does not have.
    """
    names: dict[str, str] = {}
    stored: dict[str, Tensor] = {}
    first: dict[Any, str] = {}
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise SaveError(
                f"the weight {name} has the layout {tensor.layout}, but packages support strided "
                "tensors only."
            )
        if tensor.dtype not in _NAMES:
            raise SaveError(
                f"the weight {name} has dtype {tensor.dtype}, which safetensors does not support"
            )
        place = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        names[name] = first.setdefault(place, name) if tensor.numel() else name
        if names[name] == name:
            stored[name] = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return _joined(stored), names


def _joined(tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file in which nearly all tensors begin where vector instructions read."""
    # The format has no gaps, so those come first that leave none.
    order = sorted(tensors.items(), key=lambda x: (x[1].nbytes % ALIGNMENT > 0, -x[1].itemsize))
    header, end = dict[str, Any](), 0
    for name, tensor in order:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [begin, end]}  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-(_LENGTH + len(text)) % ALIGNMENT)
    contents = (tensor.reshape(-1).view(torch.uint8).numpy().data for _, tensor in order)
    return b"".join([len(text).to_bytes(_LENGTH, "little"), text, *contents])


def loaded(content: Tensor) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file as views of its bytes.

    safetensors' own reader copies what is not a file of its own.

    Args:
        content: The bytes of the file.

    Raises:
        PackageError: It is none.
    """
    try:
        length = int.from_bytes(content[:_LENGTH].numpy().tobytes(), "little")
        header = json.loads(content[_LENGTH : _LENGTH + length].numpy().tobytes())
        header.pop("__metadata__", None)
        data = content[_LENGTH + length :]
        return {name: _tensor(data, **entry) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise PackageError(f"weights cannot be read: {brief_error(error)}") from error


def _tensor(data: Tensor, dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
    begin, end = data_offsets
    if not 0 <= begin <= end <= len(data):
        raise ValueError("a tensor lies outside of the file")
    if begin == end:
        return torch.empty(shape, dtype=_DTYPES[dtype])
    return data[begin:end].view(_DTYPES[dtype]).view(shape)


def placed(tensor: Tensor, like: Spec) -> Tensor:
    """Returns the tensor, or a copy with the strides and on the device that are asked for.

    Raises:
        PackageError: Shape or dtype differ, or there is no such device.
    """
    if tuple(tensor.shape) != like.shape or tensor.dtype != like.dtype:
        raise PackageError(
            f"a weight is {tensor.dtype}{list(tensor.shape)}, but the graph expects "
            f"{like.dtype}{list(like.shape)}"
        )
    if (tensor.stride(), str(tensor.device)) == (like.strides, like.device):
        return tensor
    try:
        return like.empty().copy_(tensor)
    except RuntimeError as error:
        raise PackageError(f"weights cannot be moved to {like.device}: {error}") from error


def shared_with(path: Path, tensors: Mapping[str, Tensor]) -> Checkpoint:
    """Returns which tensors a checkpoint has, under the same names and with the same contents.

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
            f"{path} contains none of the model's weights. Its names and values must be those of "
            "model.state_dict()."
        )
    return Checkpoint(path.name, file_sha256(path), tuple(same))


def _equal(stored: Tensor, tensor: Tensor) -> bool:
    same = stored.dtype == tensor.dtype and stored.shape == tensor.shape
    return same and torch.equal(stored, tensor)


def from_checkpoint(path: Path, known: Checkpoint) -> dict[str, Tensor]:
    """Returns the tensors that a package takes from a checkpoint.

    Raises:
        PackageError: It is missing, or another one.
    """
    from safetensors import safe_open

    if not path.is_file():
        raise PackageError(
            f"the package reads weights from {known.name}, but there is no file {path}. Put the "
            "checkpoint there, or pass its path: load(path, checkpoint=...)."
        )
    if file_sha256(path) != known.sha256:
        raise PackageError(
            f"{path} is not the checkpoint that the package was saved with (its checksum differs). "
            "Pass the original file: load(path, checkpoint=...)."
        )
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in known.tensors}


def file_sha256(path: Path) -> str:
    """Returns a checksum of a file."""
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

"""Copies of what a step will write over: in memory, or, if that is much, in a file."""

import ctypes
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO

import torch
from torch import Tensor

from dynamo_backends.graph.aliasing import tensor_bytes
from dynamo_backends.graph.layouts import empty_strided_like
from dynamo_backends.runtime.atomic_copies import copy_atomically
from dynamo_backends.runtime.cache import cache_folder
from dynamo_backends.runtime.private_folder import open_private_folder

log = logging.getLogger("dynamo_backends")

IN_MEMORY = 1 << 26  # bytes; more go to a file


class TensorBackups:
    """Copies of tensors' contents, made before a step overwrites them."""

    def __init__(self, tensors: Mapping[int, Tensor]):
        self._kinds = {i: empty_strided_like(t, "meta") for i, t in tensors.items()}
        self._kept: dict[int, Tensor] = {}
        self._file: IO[bytes] | None = None
        if sum(map(tensor_bytes, tensors.values())) > IN_MEMORY:
            self._file = _written(tensors)
        if self._file is None:
            self._kept = {i: t.detach().clone() for i, t in tensors.items()}

    def load(self) -> dict[int, Tensor]:
        """Returns the copies, with the strides of the tensors."""
        if self._file is None:
            return self._kept
        self._file.seek(0)
        return {i: _read(self._file, kind) for i, kind in self._kinds.items()}

    def close(self) -> None:
        """Lets go of the copies."""
        self._kept = {}
        if self._file is not None:
            self._file.close()


@contextmanager
def restoring_on_error(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Restores tensors and gradients if the step fails (context manager)."""
    gradients = [t.grad for t in tensors]
    living = [*tensors, *(g for g in gradients if g is not None)]
    copies = TensorBackups({i: t.detach() for i, t in enumerate(living)})
    try:
        yield
    except BaseException:
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = gradient
        before = copies.load()
        targets = [t.detach() for t in living]
        copy_atomically(targets, [before[i].to(t.device) for i, t in enumerate(targets)], [], None)
        raise
    finally:
        copies.close()


def _written(tensors: Mapping[int, Tensor]) -> IO[bytes] | None:
    """Returns an anonymous file beside the disk cache; None if that is not possible."""
    try:
        folder = cache_folder()
        with open_private_folder(folder, create=True):
            file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - see `close`
        for tensor in tensors.values():
            dense = tensor.detach().cpu().contiguous()
            # Tensor.numpy() would make the storage one that cannot be resized, nor moved by XLA.
            file.write((ctypes.c_char * tensor_bytes(dense)).from_address(dense.data_ptr()))
        return file
    except OSError:
        log.debug("a training step copies tensors that it overwrites", exc_info=True)
        return None


def _read(file: IO[bytes], kind: Tensor) -> Tensor:
    contents = torch.empty(tensor_bytes(kind), dtype=torch.uint8)
    file.readinto(contents.numpy().data)  # type: ignore[attr-defined]
    dense = contents.view(kind.dtype).view(kind.shape)
    return empty_strided_like(kind, "cpu").copy_(dense)

"""Memory at addresses: numpy's views of it, and whether a tensor owns it."""

import ctypes
import gc

import numpy as np
import torch

from tests.doubles.tensorrt.checking import Misuse

STRICT = [False]
"""Whether addresses are looked up among all living tensors, which takes milliseconds."""


_KINDS = frozenset({torch.Tensor, torch.nn.Parameter})


def at(address: int, size: int, what: str) -> np.ndarray:
    """The bytes at an address.

    Raises:
        Misuse: The address is null, or no living tensor has that memory.
    """
    if address <= 0:
        raise Misuse(f"{what} has no address")
    if STRICT[0] and not _is_alive(address, size):
        raise Misuse(f"the memory of {what} is gone")
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype=np.uint8)


def _is_alive(address: int, size: int) -> bool:
    tensors = [o for o in gc.get_objects() if type(o) in _KINDS]
    ranges = map(_range, tensors)
    return any(start <= address and address + size <= end for start, end in ranges)


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    except (NotImplementedError, RuntimeError):  # fake tensors
        return 0, 0

"""Describes tensors for the manifest, and makes tensors of such descriptions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from dynamo_backends.interface.errors import PackageError


@dataclass(frozen=True)
class Spec:
    """A tensor without its contents.

    Attributes:
        dtype: Its dtype.
        shape: Its sizes.
        strides: Its strides.
        device: Its device, such as "cpu".
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: str = "cpu"

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Describes a tensor, which may be fake."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), str(tensor.device))

    def empty(self) -> Tensor:
        """Returns a tensor like that, whose contents are not set."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)

    def to_dict(self) -> dict[str, Any]:
        """Returns the description in types that JSON has."""
        return {
            "dtype": str(self.dtype).removeprefix("torch."), "shape": list(self.shape),
            "strides": list(self.strides), "device": self.device,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """Returns the reverse of `to_dict`.

        Raises:
            PackageError: It names no dtype.
        """
        dtype = getattr(torch, given["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise PackageError(
                f"a tensor has dtype {given['dtype']!r}, which this torch version does not have"
            )
        return cls(dtype, tuple(given["shape"]), tuple(given["strides"]), given["device"])

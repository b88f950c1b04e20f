"""Types of elements, tensors and numbers of the double."""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


class FusionError(RuntimeError):
    """What nvFuser's own checks raise, and the double's stricter ones."""


TORCH = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Int": torch.int64,
    "Int32": torch.int32,
    "Bool": torch.bool,
}
FLOATS = frozenset({"Double", "Float"})
HALVES = frozenset({"Half", "BFloat16"})
INTEGERS = frozenset({"Int", "Int32"})


DataType = enum.Enum("DataType", {n: n for n in (*TORCH, "Null")})  # type: ignore[misc]


def check(condition: object, text: str) -> None:
    if not condition:
        raise FusionError(text)


@dataclass(eq=False, repr=False)
class Val:
    """A tensor or a number of a definition.

    Attributes:
        owner: The definition.
        dtype: Name of its type.
        broadcast: For each dimension of a tensor whether it is broadcast; None: decided by the
            sizes when it runs (nvFuser's symbolic dimensions). None for a number.
        evaluate: From the values that it is made of to its own.
        sources: What it is made of.
        input: What it was defined as, if it is an input.
    """

    owner: Any
    dtype: str
    broadcast: tuple[bool | None, ...] | None
    evaluate: Callable[..., Any] | None = None
    sources: Sequence["Val"] = ()
    input: "InputInfo | None" = None
    parts: dict[int, "Val"] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"{self.dtype} of {self.ndim} dimensions" if self.is_tensor else self.dtype

    @property
    def ndim(self) -> int:
        assert self.broadcast is not None
        return len(self.broadcast)

    @property
    def is_tensor(self) -> bool:
        return self.broadcast is not None


@dataclass(frozen=True)
class InputInfo:
    """How an input was defined."""

    shape: tuple[int, ...]
    contiguity: tuple[bool | None, ...]
    stride_order: tuple[int, ...]

    def check(self, tensor: torch.Tensor, dtype: str) -> None:
        """Raises if a tensor is not what was defined."""
        text = f"{tensor.dtype}{list(tensor.shape)} with strides {tensor.stride()} for {self}"
        check(tensor.dtype == TORCH[dtype], f"its type is not {dtype}: {text}")
        check(tensor.ndim == len(self.shape), f"its rank is wrong: {text}")
        check(not tensor.is_neg() and not tensor.is_conj(), f"it is lazily negated: {text}")
        rank = tensor.ndim
        order = sorted(range(rank), key=lambda d: -self.stride_order[d])
        expected = 1
        previous = 0
        for place in reversed(range(rank)):
            d = order[place]
            size, stride, flag = tensor.shape[d], tensor.stride(d), self.contiguity[place]
            check(size > 0, f"it has no elements: {text}")
            if self.shape[d] == 1:
                check(size == 1, f"dimension {d} was defined as broadcast: {text}")
            else:
                check(size != 1, f"dimension {d} has size 1 and was not defined so: {text}")
            if flag is None:
                check(size == 1 or stride == 0, f"dimension {d} is not broadcast: {text}")
                continue
            check(stride > 0, f"dimension {d} is broadcast: {text}")
            check(stride >= previous, f"the order of strides is another one: {text}")
            check(not flag or stride == expected, f"dimension {d} is not contiguous: {text}")
            expected, previous = stride * size, stride

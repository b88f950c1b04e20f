"""The values that lowerings compute with; every operation on them is written down.

nvFuser broadcasts dimensions of size 1, but never adds a dimension or converts a type unasked
here: both are made explicit.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Union

import torch

from dynamo_backends.nvfuser.dtypes import computing

if TYPE_CHECKING:
    from dynamo_backends.nvfuser.recorder import Recorder

Number = bool | int | float
Operand = Union["Value", "Scalar", Number]


class Scalar:
    """A number that a fusion computes from sizes.

    Args:
        index: Of the value in the program.
        dtype: Its type.
    """

    def __init__(self, index: int, dtype: torch.dtype):
        self.index = index
        self.dtype = dtype


class Value:
    """A tensor of a fusion.

    Args:
        recorder: Where it is computed.
        index: Of the value in the program.
        shape: Its sizes in the graph that is being lowered.
        dtype: Its type.
    """

    def __init__(self, recorder: "Recorder", index: int, shape: Sequence[int], dtype: torch.dtype):
        self.recorder = recorder
        self.index = index
        self.shape = tuple(shape)
        self.dtype = dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def is_floating_point(self) -> bool:
        """Whether its type is one of floating-point numbers."""
        return self.dtype.is_floating_point

    def dims(self, dim: "int | Sequence[int] | None" = None) -> tuple[int, ...]:
        """Dimensions from 0 on. None, and mostly an empty list, mean all of them in torch."""
        if dim is None or (not isinstance(dim, int) and not len(dim)) or not self.ndim:
            return tuple(range(self.ndim))
        return tuple(d % self.ndim for d in ((dim,) if isinstance(dim, int) else dim))

    def unary(self, op: str, dtype: torch.dtype | None = None) -> "Value":
        """Returns an operation on each element."""
        return self.recorder.tensor(op, (self,), self.shape, dtype or self.dtype)

    def cast(self, dtype: torch.dtype) -> "Value":
        """Returns the same numbers in another type; itself if it has that one.

        The halves come from and become float32 only, as in eager.
        """
        if dtype == self.dtype:
            return self
        between = {computing(self.dtype), computing(dtype)} - {self.dtype, dtype}
        if between:
            return self.cast(between.pop()).cast(dtype)
        if dtype == torch.bool:
            return self.differs(0)
        return self.recorder.tensor("cast", (self, dtype), self.shape, dtype)

    def binary(self, op: str, other: Operand, dtype: torch.dtype | None = None) -> "Value":
        """Returns an operation on pairs of elements, which have one type."""
        return self.recorder.binary(op, self, other, dtype)

    def __add__(self, other: Operand) -> "Value":
        """Sum."""
        return self.binary("add", other)

    def __radd__(self, other: Number) -> "Value":
        """Sum."""
        return self.recorder.binary("add", other, self)

    def __sub__(self, other: Operand) -> "Value":
        """Difference."""
        return self.binary("sub", other)

    def __rsub__(self, other: Number) -> "Value":
        """Difference."""
        return self.recorder.binary("sub", other, self)

    def __mul__(self, other: Operand) -> "Value":
        """Product."""
        return self.binary("mul", other)

    def __rmul__(self, other: Number) -> "Value":
        """Product."""
        return self.recorder.binary("mul", other, self)

    def __truediv__(self, other: Operand) -> "Value":
        """Quotient of floating-point numbers."""
        return self.binary("div", other)

    def __rtruediv__(self, other: Number) -> "Value":
        """Quotient of floating-point numbers."""
        return self.recorder.binary("div", other, self)

    def __neg__(self) -> "Value":
        """Opposite."""
        return self.unary("neg")

    def __lt__(self, other: Operand) -> "Value":
        """Computes `self < other`, element by element."""
        return self.binary("lt", other, torch.bool)

    def __le__(self, other: Operand) -> "Value":
        """Computes `self <= other`, element by element."""
        return self.binary("le", other, torch.bool)

    def __gt__(self, other: Operand) -> "Value":
        """Computes `self > other`, element by element."""
        return self.binary("gt", other, torch.bool)

    def __ge__(self, other: Operand) -> "Value":
        """Computes `self >= other`, element by element."""
        return self.binary("ge", other, torch.bool)

    def equals(self, other: Operand) -> "Value":
        """Computes `self == other`, element by element."""
        return self.binary("eq", other, torch.bool)

    def differs(self, other: Operand) -> "Value":
        """Returns whether not equal; NaN differs from itself."""
        return self.binary("ne", other, torch.bool)

    def __and__(self, other: "Value") -> "Value":
        """Returns whether both hold."""
        return self.binary("logical_and", other)

    def __or__(self, other: "Value") -> "Value":
        """Returns whether one holds."""
        return self.binary("logical_or", other)

    def __invert__(self) -> "Value":
        """Returns whether it does not hold."""
        return self.unary("logical_not")

    def where(self, yes: Operand, no: Operand) -> "Value":
        """Elements of one or the other, as this condition says."""
        return self.recorder.where(self, yes, no)

    def unsqueeze(self, dims: Sequence[int]) -> "Value":
        """With dimensions of size 1 at these places of the result."""
        if not dims:
            return self
        total = self.ndim + len(dims)
        flags = tuple(d in dims for d in range(total))
        sizes = iter(self.shape)
        shape = tuple(1 if new else next(sizes) for new in flags)
        return self.recorder.tensor("broadcast", (self, flags), shape, self.dtype)

    def squeeze(self, dims: Sequence[int]) -> "Value":
        """Without these dimensions, all of size 1."""
        if not dims:
            return self
        shape = tuple(size for d, size in enumerate(self.shape) if d not in dims)
        return self.recorder.tensor("squeeze", (self, tuple(dims)), shape, self.dtype)

    def leading(self, ndim: int) -> "Value":
        """With so many dimensions: new ones of size 1 come first."""
        return self.unsqueeze(range(ndim - self.ndim))

    def expand(self, shape: Sequence[int]) -> "Value":
        """Broadcast to a shape."""
        return self.recorder.expand(self, shape)

    def reshape(self, shape: Sequence[int]) -> "Value":
        """Returns the same elements, row by row, in another shape."""
        return self.recorder.reshape(self, shape)

    def permute(self, dims: Sequence[int]) -> "Value":
        """With its dimensions in another order."""
        return self.recorder.permute(self, dims)

    def slice(self, dim: int, start: int, end: int) -> "Value":
        """Returns the elements from `start` to before `end` along a dimension."""
        return self.recorder.slice(self, dim, start, end)

    def reduce(self, op: str, dims: Sequence[int], keepdim: bool = False) -> "Value":
        """One number for all elements along some dimensions ("sum", "prod", "max", "min")."""
        return self.recorder.reduce(op, self, dims, keepdim)

    def sum(self, dims: Sequence[int], keepdim: bool = False) -> "Value":
        """Returns the sum along some dimensions."""
        return self.reduce("sum", dims, keepdim)

    def mean(self, dims: Sequence[int], keepdim: bool = False) -> "Value":
        """Returns the mean along some dimensions."""
        return self.sum(dims, keepdim) / self.count(dims)

    def count(self, dims: Sequence[int], less: int = 0) -> "Scalar | int":
        """Returns how many elements but `less` there are along some dimensions, in its own type."""
        return self.recorder.count(self, dims, less)

    def elements(self, dims: Sequence[int]) -> int:
        """How many elements there are along some dimensions in the graph that is being lowered."""
        return math.prod(self.shape[d] for d in dims)

"""Writes down the program of a fusion while lowerings compute with its values."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Union

import torch
from torch import Tensor

from dynamo_backends.nvfuser.dtypes import NAMES, compute_dtype, constant_kind, describe
from dynamo_backends.nvfuser.program import (
    Argument,
    Constant,
    FusionProgram,
    Input,
    Operation,
    Ref,
    Size,
    TypeName,
)

Number = bool | int | float
Operand = Union["Value", "Scalar", Number]


class Scalar:
    """A number that a fusion computes from sizes.

    Args:
        index: Index of the value in the program.
        dtype: Its type.
    """

    def __init__(self, index: int, dtype: torch.dtype):
        self.index = index
        self.dtype = dtype


class Value:
    """A tensor of a fusion.

    Args:
        recorder: Where it is computed.
        index: Index of the value in the program.
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
        """Returns whether its type is one of floating-point numbers."""
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
        between = {compute_dtype(self.dtype), compute_dtype(dtype)} - {self.dtype, dtype}
        if between:
            return self.cast(between.pop()).cast(dtype)
        if dtype == torch.bool:
            return self.differs(0)
        return self.recorder.tensor("cast", (self, dtype), self.shape, dtype)

    def binary(self, op: str, other: Operand, dtype: torch.dtype | None = None) -> "Value":
        """Returns an operation on pairs of elements, which have one type."""
        return self.recorder.binary(op, self, other, dtype)

    def __add__(self, other: Operand) -> "Value":
        """Returns the sum of two sizes."""
        return self.binary("add", other)

    def __radd__(self, other: Number) -> "Value":
        """Returns the sum of two sizes."""
        return self.recorder.binary("add", other, self)

    def __sub__(self, other: Operand) -> "Value":
        """Returns the difference of two sizes."""
        return self.binary("sub", other)

    def __rsub__(self, other: Number) -> "Value":
        """Returns the difference of two sizes."""
        return self.recorder.binary("sub", other, self)

    def __mul__(self, other: Operand) -> "Value":
        """Returns the product of two sizes."""
        return self.binary("mul", other)

    def __rmul__(self, other: Number) -> "Value":
        """Returns the product of two sizes."""
        return self.recorder.binary("mul", other, self)

    def __truediv__(self, other: Operand) -> "Value":
        """Quotient of floating-point numbers."""
        return self.binary("div", other)

    def __rtruediv__(self, other: Number) -> "Value":
        """Quotient of floating-point numbers."""
        return self.recorder.binary("div", other, self)

    def __neg__(self) -> "Value":
        """Returns the negative of a size."""
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
        """Adds leading dimensions of size 1 up to a number of dimensions."""
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
        """Returns the number of elements along dimensions in the graph that is being lowered."""
        return math.prod(self.shape[d] for d in dims)


class Recorder:
    """A program that grows.

    Args:
        symbolic: Read sizes off tensors where possible, so that the program serves other shapes
            too. Else sizes are numbers.

    Attributes:
        origin: The node that is being lowered.
    """

    def __init__(self, symbolic: bool = True):
        self.origin = ""
        self._symbolic = symbolic
        self._inputs: list[Input] = []
        self._steps: list[Operation] = []
        self._count = 0
        self._sizes: dict[int, Size] = {}
        self._permuted: dict[int, tuple[Value, tuple[int, ...]]] = {}

    def program(self, outputs: Iterable[Value]) -> FusionProgram:
        """Returns what was recorded as a program that returns some values."""
        return FusionProgram(
            tuple(self._inputs), tuple(self._steps), tuple(v.index for v in outputs)
        )

    @property
    def operations(self) -> set[str]:
        """Names of nvFuser's operations that are used."""
        return {step.op for step in self._steps}

    def input(self, value: Tensor) -> Value:
        """Another input; they all come before the first operation."""
        assert not self._steps
        self._inputs.append(describe(value))
        return self._value(value.shape, value.dtype)

    def _value(self, shape: Sequence[int], dtype: torch.dtype) -> Value:
        value = Value(self, self._count, shape, dtype)
        self._count += 1
        for dim, size in enumerate(value.shape):
            if size > 1 and self._symbolic:
                self._sizes.setdefault(size, Size(value.index, dim))
        return value

    def tensor(
        self, op: str, args: Sequence[Any], shape: Sequence[int], dtype: torch.dtype
    ) -> Value:
        """Returns an operation with one result.

        Args:
            op: Name in `fd.ops`.
            args: Values, types, flags, and tuples of numbers and sizes.
            shape: Shape of the result.
            dtype: Dtype of the result.
        """
        self._step(op, args)
        return self._value(shape, dtype)

    def _step(self, op: str, args: Sequence[Any], results: int = 1) -> None:
        plain = tuple(map(_argument, args))
        self._steps.append(Operation(op, plain, results, self.origin))

    def binary(self, op: str, x: Operand, y: Operand, dtype: torch.dtype | None = None) -> Value:
        """Returns an operation on pairs of elements of one type.

        Args:
            op: Name in `fd.ops`.
            x: A value or a number, which takes the other's type.
            y: The same; one of both is a value.
            dtype: Dtype of the result; None: that of the operands.
        """
        values = self._aligned((x, y))
        kind = _common(values)
        args = [_typed(v, kind) for v in values]
        return self.tensor(op, args, _broadcast(values), dtype or kind)

    def where(self, condition: Value, yes: Operand, no: Operand) -> Value:
        """Elements of one or the other, of which one is a value."""
        values = self._aligned((condition, yes, no))
        kind = _common(values[1:])
        args = [values[0], *(_typed(v, kind) for v in values[1:])]
        return self.tensor("where", args, _broadcast(values), kind)

    def _aligned(self, operands: Sequence[Operand]) -> list[Operand]:
        """Operands of one rank; numbers stay as they are."""
        ndim = max(v.ndim for v in operands if isinstance(v, Value))
        return [v.leading(ndim) if isinstance(v, Value) else v for v in operands]

    def size(self, size: int) -> Size | int:
        """Returns a size as it is found when the fusion runs, if any tensor has it."""
        return self._sizes.get(size, size)

    def sizes(self, shape: Sequence[int]) -> tuple[Size | int, ...]:
        """Returns the sizes of a shape."""
        return tuple(map(self.size, shape))

    def expand(self, value: Value, shape: Sequence[int]) -> Value:
        """Returns a value broadcast to a shape."""
        if value.shape == tuple(shape):
            return value
        places = tuple(range(len(shape) - value.ndim, len(shape)))
        arguments = (value, self.sizes(shape), places)
        return self.tensor("broadcast_in_dim", arguments, shape, value.dtype)

    def reshape(self, value: Value, shape: Sequence[int]) -> Value:
        """Returns a value's elements, row by row, in another shape."""
        shape = tuple(shape)
        if shape == value.shape:
            return value
        if _without_ones(shape) == _without_ones(value.shape):
            value = value.squeeze([d for d, size in enumerate(value.shape) if size == 1])
            return value.unsqueeze([d for d, size in enumerate(shape) if size == 1])
        sizes = tuple(self._reshaped_size(value, size) for size in shape)
        return self.tensor("reshape", (value, sizes), shape, value.dtype)

    def _reshaped_size(self, value: Value, size: int) -> Any:
        """Returns a size; one that merges several dimensions is computed from theirs."""
        known = self.size(size)
        if not self._symbolic or isinstance(known, Size) or size == 1:
            return known
        for first in range(value.ndim):
            for last in range(first + 2, value.ndim + 1):
                if math.prod(value.shape[first:last]) == size:
                    return self._product([self.size(s) for s in value.shape[first:last] if s > 1])
        return size

    def _product(self, factors: Sequence[Size | int]) -> Any:
        symbolic = [f for f in factors if isinstance(f, Size)]
        rest = math.prod(f for f in factors if isinstance(f, int))
        product: Any = symbolic[0] if symbolic else rest
        others = [*symbolic[1:], *([Constant(rest, "Int")] if rest != 1 else [])]
        for factor in others if symbolic else ():
            product = self._scalar("mul", (product, factor), torch.int64)
        return product

    def _scalar(self, op: str, args: Sequence[Any], dtype: torch.dtype) -> Scalar:
        self._step(op, args)
        self._count += 1
        return Scalar(self._count - 1, dtype)

    def count(self, value: Value, dims: Sequence[int], less: int = 0) -> Scalar | int:
        """Returns how many elements a value has along some dimensions, in its type.

        Args:
            value: Value of floating-point numbers.
            dims: The dimensions.
            less: Number of elements that do not count.
        """
        product = self._product([self.size(value.shape[d]) for d in dims if value.shape[d] > 1])
        if isinstance(product, int):
            return product - less
        if less:
            product = self._scalar("sub", (product, Constant(less, "Int")), torch.int64)
        return self._scalar("cast", (product, value.dtype), value.dtype)

    def permute(self, value: Value, dims: Sequence[int]) -> Value:
        """Returns a value with its dimensions in another order; two such become one, or none.

        A matrix that is transposed twice, as the weight of a linear layer is, would be copied.
        """
        source, before = self._permuted.get(value.index, (value, tuple(range(value.ndim))))
        order = tuple(before[d] for d in dims)
        if order == tuple(range(value.ndim)):
            return source
        shape = tuple(source.shape[d] for d in order)
        result = self.tensor("permute", (source, order), shape, source.dtype)
        self._permuted[result.index] = (source, order)
        return result

    def slice(self, value: Value, dim: int, start: int, end: int) -> Value:
        """Returns the elements from `start` to before `end` along a dimension."""
        if (start, end) == (0, value.shape[dim]):
            return value
        shape = (*value.shape[:dim], end - start, *value.shape[dim + 1 :])
        starts = tuple(start if d == dim else 0 for d in range(value.ndim))
        whole = [Size(value.index, d) if self._symbolic else s for d, s in enumerate(value.shape)]
        if end != value.shape[dim]:
            whole[dim] = end
        return self.tensor("slice", (value, starts, tuple(whole)), shape, value.dtype)

    def reduce(self, op: str, value: Value, dims: Sequence[int], keepdim: bool = False) -> Value:
        """One number for all elements along some dimensions; those of size 1 are only removed."""
        many, ones = _split(value, dims)
        if many:
            shape = tuple(s for d, s in enumerate(value.shape) if d not in many)
            value = self.tensor(op, (value, tuple(many)), shape, value.dtype)
        return _finish(value, many, ones, keepdim)

    def var_mean(
        self, value: Value, dims: Sequence[int], correction: int, keepdim: bool = False
    ) -> tuple[Value, Value]:
        """Variance and mean along some dimensions, of which one has more than one element."""
        many, ones = _split(value, dims)
        value = value.squeeze(ones)
        along = tuple(d - sum(one < d for one in ones) for d in many)
        self._step("var_mean", (value, along, correction), 2)
        shape = tuple(s for d, s in enumerate(value.shape) if d not in along)
        results = [self._value(shape, value.dtype) for _ in range(2)]
        if not keepdim:
            return results[0], results[1]
        var, mean = (v.unsqueeze(sorted((*many, *ones))) for v in results)
        return var, mean

    def concatenate(self, values: Sequence[Value], dim: int) -> Value:
        """Values of one type, one after the other along a dimension."""
        if len(values) == 1:
            return values[0]
        shape = list(values[0].shape)
        shape[dim] = sum(v.shape[dim] for v in values)
        return self.tensor("cat", (tuple(values), dim), shape, values[0].dtype)

    def pad(self, value: Value, widths: Sequence[int], number: Number) -> Value:
        """Returns a value with a margin of one number; widths as in `torch.nn.functional.pad`."""
        shape = list(value.shape)
        for i in range(len(widths) // 2):
            shape[-1 - i] += widths[2 * i] + widths[2 * i + 1]
        filling = _constant(number, value.dtype, constant_kind(value.dtype))
        return self.tensor("pad", (value, tuple(widths), filling), shape, value.dtype)

    def full(self, shape: Sequence[int], number: Number, dtype: torch.dtype) -> Value:
        """Returns a tensor of one number."""
        filling = _constant(number, dtype, constant_kind(dtype))
        return self.tensor("full", (self.sizes(shape), filling, dtype), shape, dtype)

    def iota(self, length: int, start: int, step: int) -> Value:
        """Returns the integers from `start` on, in equal steps."""
        size = self.size(length)
        first: Any = size if isinstance(size, Size) else Constant(length, "Int")
        args = (first, Constant(start, "Int"), Constant(step, "Int"), torch.int64)
        return self.tensor("iota", args, (length,), torch.int64)


def _argument(value: Any) -> Argument:
    if isinstance(value, Value | Scalar):
        return Ref(value.index)
    if isinstance(value, torch.dtype):
        return TypeName(NAMES[value])
    if isinstance(value, tuple):
        return tuple(map(_argument, value))
    if type(value) not in (Constant, Size, bool):
        return int(value)  # of any kind: what is written down are plain integers
    plain: Argument = value
    return plain


def _common(operands: Sequence[Operand]) -> torch.dtype:
    """Returns the one type of operands; a lowering that mixes types is wrong."""
    kinds = {v.dtype for v in operands if isinstance(v, Value | Scalar)}
    if len(kinds) != 1:
        raise TypeError(f"operands of types {sorted(map(str, kinds))}")
    return kinds.pop()


def _typed(operand: Operand, dtype: torch.dtype) -> Any:
    if isinstance(operand, Value | Scalar):
        return operand
    return _constant(operand, dtype, NAMES[dtype])


_PYTHON: tuple[tuple[Callable[[torch.dtype], bool], Callable[[Any], Number]], ...] = (
    (lambda dtype: dtype.is_floating_point, float),
    (lambda dtype: dtype == torch.bool, bool),
    (lambda dtype: True, int),
)


def _constant(number: Number, dtype: torch.dtype, kind: str) -> Constant:
    convert = next(convert for applies, convert in _PYTHON if applies(dtype))
    return Constant(convert(number), kind)


def _broadcast(operands: Sequence[Operand]) -> tuple[int, ...]:
    shapes = [v.shape for v in operands if isinstance(v, Value)]
    return tuple(torch.broadcast_shapes(*shapes))


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def _split(value: Value, dims: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns those of some dimensions that have several elements, and those that have one."""
    chosen = sorted(set(dims))
    ones = [d for d in chosen if value.shape[d] == 1]
    return [d for d in chosen if d not in ones], ones


def _finish(value: Value, removed: Sequence[int], ones: Sequence[int], keepdim: bool) -> Value:
    if keepdim:
        return value.unsqueeze(removed)
    return value.squeeze([d - sum(r < d for r in removed) for d in ones])

"""Converts torch tensors to a runtime's dense arrays and back, mostly without copies.

Arrays of XLA, ONNX Runtime and OpenVINO are dense and row-major. A torch tensor that is dense in
another dimension order (channels last, a transposed matrix) is handed over as its permutation that
is row-major, and the program is told so; a tensor that is not dense (a slice, an expanded tensor)
is copied.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from dynamo_backends._torch_private import apply_conj_neg_bits
from dynamo_backends.graph.symbolic_sizes import SizeWithExpression

ALIGNMENT = 64  # bytes; XLA copies what is not aligned so


@dataclass(frozen=True)
class MemoryLayout:
    """The order of a tensor's dimensions in memory, outermost first, and expanded ones.

    Attributes:
        order: A permutation of the tensor's dimensions.
        expanded: Dimensions with stride 0 that memory holds only once.
    """

    order: tuple[int, ...]
    expanded: tuple[int, ...] = ()

    @property
    def is_row_major(self) -> bool:
        """Returns whether the order is the tensor's own and no dimension is expanded."""
        return not self.expanded and self.order == tuple(range(len(self.order)))

    @property
    def is_channels_last(self) -> bool:
        """Returns whether the memory order is (N, *spatial, C), of 3 or more dimensions."""
        n = len(self.order)
        return n >= 3 and not self.expanded and self.order == (0, *range(2, n), 1)

    @property
    def inverse_order(self) -> list[int]:
        """Returns the permutation from memory order back to the tensor's own dimensions."""
        return sorted(range(len(self.order)), key=self.order.__getitem__)

    def dense_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the sizes in memory order; those of expanded dimensions are 1.

        Args:
            shape: In the order of the tensor's dimensions.
        """
        return tuple(1 if d in self.expanded else shape[d] for d in self.order)


def row_major_layout(ndim: int) -> MemoryLayout:
    """Returns the layout of a contiguous tensor of `ndim` dimensions."""
    return MemoryLayout(tuple(range(ndim)))


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a row-major tensor; of an empty one torch's may differ."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def to_row_major(tensor: Tensor) -> Tensor:
    """Returns the detached tensor, copied only if it is not contiguous or a lazy conjugate."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def copy_if_misaligned(tensor: Tensor) -> Tensor:
    """Returns the tensor, or a copy if its address is no multiple of `ALIGNMENT` bytes."""
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


def infer_layout(value: Tensor) -> MemoryLayout:
    """Infers a memory layout from strides; row-major if the tensor has gaps or overlaps.

    Args:
        value: Any strided tensor. One that is not dense gets the row-major order.
    """
    expanded = tuple(
        d
        for d, (n, s) in enumerate(zip(value.shape, value.stride(), strict=True))
        if n > 1 and not s
    )
    if value.is_contiguous():
        return row_major_layout(value.ndim)
    order = _memory_order(value) if expanded else dense_order(value)
    return row_major_layout(value.ndim) if order is None else MemoryLayout(order, expanded)


def infer_input_layout(value: Tensor) -> MemoryLayout:
    """Infers the layout an input is handed over in; expanded inputs become row-major."""
    storage = infer_layout(value)
    return row_major_layout(value.ndim) if storage.expanded else storage


def _memory_order(value: Tensor) -> tuple[int, ...]:
    return tuple(sorted(range(value.ndim), key=lambda d: (-value.stride()[d], d)))


def dense_order(value: Tensor) -> tuple[int, ...] | None:
    """Returns the dimensions in memory order; None if the tensor has gaps or overlaps."""
    order = _memory_order(value)
    return order if is_dense(value, MemoryLayout(order)) else None


def is_dense(value: Tensor, storage: MemoryLayout) -> bool:
    """Returns whether a tensor stored in this layout has neither gaps nor overlaps."""
    expected = 1
    for d in reversed(storage.order):
        if d not in storage.expanded and value.shape[d] != 1:
            if value.stride(d) != expected:
                return False
            expected *= value.shape[d]
    return True


def empty_strided_like(value: Tensor, device: torch.device | str | None = None) -> Tensor:
    """Allocates an uninitialized tensor of the same shape, dtype and exact strides.

    Args:
        value: The tensor. If it is a lazy conjugate, so is the result.
        device: Where; None: where that is.
    """
    device = value.device if device is None else device
    shape, strides = value.shape, value.stride()
    return apply_conj_neg_bits(
        value, torch.empty_strided(shape, strides, dtype=value.dtype, device=device)
    )


def resolve_conj_and_neg(lazy: Tensor) -> Tensor:
    """Copies a lazy conjugate or negative into plain memory with the same strides."""
    shape, strides = lazy.shape, lazy.stride()
    memory = torch.empty_strided(shape, strides, dtype=lazy.dtype, device=lazy.device)
    return memory.copy_(lazy)


class InputConverter:
    """Checks an input and converts it to the memory order that the program expects.

    Args:
        value: The fake tensor that the program was compiled for.

    Attributes:
        storage: The order of dimensions that the program expects.
        shape: Of the tensor.
        dtype: Of the tensor.
        dense_shape: In the order of dimensions that the program expects.
    """

    def __init__(self, value: Tensor):
        self.storage = storage = infer_input_layout(value)
        self.shape = tuple(value.shape)
        self.dtype = value.dtype
        self.dense_shape = tuple(value.shape[d] for d in storage.order)
        self._permute = None if storage.is_row_major else storage.order

    def __call__(self, tensor: Tensor) -> Tensor:
        """Returns the input as a row-major tensor: itself, a view of it, or else a copy.

        Raises:
            ValueError: Shape or dtype differ from what was compiled.
        """
        tensor = self.to_program_order(tensor)
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        return tensor if tensor.is_contiguous() else tensor.contiguous()

    def to_program_order(self, tensor: Tensor) -> Tensor:
        """Checks shape and dtype, detaches, and permutes to the program's order; may have gaps.

        Raises:
            ValueError: Shape or dtype differ from what was compiled.
        """
        if tensor.shape != self.shape or tensor.dtype != self.dtype:
            self._refuse(tensor)
        if tensor.requires_grad:
            tensor = tensor.detach()
        return tensor if self._permute is None else tensor.permute(self._permute)

    def _refuse(self, tensor: Tensor) -> NoReturn:
        raise ValueError(
            f"the executable was compiled for {self.dtype}{list(self.shape)}, but called with "
            f"{tensor.dtype}{list(tensor.shape)}"
        )


class DynamicInputConverter(InputConverter):
    """As `InputConverter`, for inputs with dynamic sizes: only fixed sizes are checked.

    Args:
        value: The fake tensor of one call.
        sizes: Of the tensor; those that vary are of the class `SizeWithExpression`.
    """

    def __init__(self, value: Tensor, sizes: Sequence[int | None]):
        super().__init__(value)
        self._fixed = [(d, n) for d, n in enumerate(sizes) if not isinstance(n, SizeWithExpression)]

    def to_program_order(self, tensor: Tensor) -> Tensor:
        """Checks dtype, rank and fixed sizes, detaches, and permutes to the program's order."""
        same_kind = tensor.dtype == self.dtype and tensor.dim() == len(self.shape)
        if not same_kind or any(tensor.shape[d] != n for d, n in self._fixed):
            self._refuse(tensor)
        if tensor.requires_grad:
            tensor = tensor.detach()
        return tensor if self._permute is None else tensor.permute(self._permute)


class OutputConverter:
    """Gives a program's output the strides that torch promises, by a view or a copy.

    The program returns the dimensions in memory order, expanded ones with size 1; here they are
    put back as a view.

    Args:
        value: The fake tensor with the promised shape and strides.

    Attributes:
        copies: Whether the output is a copy of what the program returns.
        dense_shape: Of what the program returns.
    """

    def __init__(self, value: Tensor):
        self.storage = infer_layout(value)
        self.dense_shape = self.storage.dense_shape(value.shape)
        self._shape = tuple(value.shape)
        self._stride = tuple(value.stride())
        self._inverse = self.storage.inverse_order
        self.copies = self._needs_copy(value)
        self._is_empty = value.numel() == 0
        self.is_plain = self.storage.is_row_major and not self.copies and not self._is_empty

    def _needs_copy(self, value: Tensor) -> bool:
        if value.numel() == 0 or value.is_contiguous() or self.storage.expanded:
            return False
        return dense_order(value) is None

    def __call__(self, tensor: Tensor) -> Tensor:
        """Returns the program's output with the shape and strides that torch promises."""
        if self.is_plain:
            return tensor
        if self.copies or self._is_empty:
            # Tensors without elements are there to be resized, which only torch's memory can be.
            result = torch.empty_strided(
                self._shape, self._stride, dtype=tensor.dtype, device=tensor.device
            )
            return result.copy_(tensor)
        return tensor.permute(self._inverse).expand(self._shape)


class DynamicOutputConverter:
    """As `OutputConverter`, for outputs with dynamic sizes: each call gives the shape.

    Args:
        value: The fake tensor of one call.

    Attributes:
        copies: The output is to be copied to memory of its own strides, which have to be given.
        dense_shape: From the output's shape, the one that the program returns.
    """

    def __init__(self, value: Tensor):
        self.storage = infer_layout(value)
        has_gaps = not self.storage.expanded and dense_order(value) is None
        self.copies = not value.numel() or has_gaps
        self._inverse = self.storage.inverse_order
        self.dense_shape = self.storage.dense_shape

    def __call__(self, tensor: Tensor, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
        """Returns the program's output with the given shape and strides.

        Args:
            tensor: From the program.
            shape: Of the output.
            strides: Of the output, if it is copied.
        """
        if self.copies:
            memory = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
            return memory.copy_(tensor.permute(self._inverse).expand(*shape))
        if self.storage.is_row_major:
            return tensor
        return tensor.permute(self._inverse).expand(*shape)

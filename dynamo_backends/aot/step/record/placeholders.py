"""Placeholders: what the user's code gets instead of the results of torch calls in a replay."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dynamo_backends._torch_private.pending_tensors import (
    PendingTensor,
    make_pending_tensor,
    materialize_pending,
)
from dynamo_backends.interface.errors import StepCaptureError


@dataclass(frozen=True)
class TensorSpec:
    """The metadata of a tensor.

    Attributes:
        size: Size of each dimension.
        stride: Likewise; empty for layouts without strides.
        offset: Offset of the first element in the storage.
        dtype: Dtype of the elements.
        device: Where it is.
        layout: Strided, or a sparse one.
        requires_grad: As at the time.
        is_leaf: Whether no autograd node has made it.
        history: The name of the autograd node that has.
        kind: The class.
    """

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout
    requires_grad: bool
    is_leaf: bool
    history: str
    kind: type

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        """Returns the metadata of a tensor."""
        strided = tensor.layout is torch.strided
        node = tensor.grad_fn
        return cls(
            tensor.shape,
            tensor.stride() if strided else (),
            int(tensor.storage_offset()) if strided else 0,
            tensor.dtype,
            tensor.device,
            tensor.layout,
            tensor.requires_grad,
            tensor.is_leaf,
            "" if node is None else node.name(),
            type(tensor),
        )

    def matches(self, tensor: Tensor) -> bool:
        """Returns whether another tensor may take the place of this one as an input."""
        return (
            type(tensor) is self.kind
            and tensor.shape == self.size
            and tensor.dtype is self.dtype
            and tensor.layout is self.layout
            and (self.layout is not torch.strided or tensor.stride() == self.stride)
            and tensor.device == self.device
            and tensor.requires_grad is self.requires_grad
            and tensor.is_leaf is self.is_leaf
        )


class Placeholder(PendingTensor):
    """A result that a replayed call has not computed.

    Attributes:
        step_value: Its number in the trie; -1: the call that would have computed it has failed.
    """

    step_value: int

    @classmethod
    def refusal(cls, func: Any) -> Exception:
        """The error of an operator that is called past torch functions, or after a failure."""
        return StepCaptureError(
            f"{func} was called with a tensor that was not computed: the call bypasses "
            "__torch_function__, or the step that would have computed the tensor failed. Call it "
            'outside of the step, or pass fallback="split".'
        )


Placeholder.__name__ = Placeholder.__qualname__ = "Tensor"  # as in messages of eager

_OWN = ("step_value",)


def make_placeholder_tensor(spec: TensorSpec, value: int) -> Placeholder:
    """Makes the tensor that stands for a result which a replay has not computed yet."""
    placeholder: Placeholder = make_pending_tensor(Placeholder, spec)
    placeholder.step_value = value
    return placeholder


def is_placeholder(value: Any) -> bool:
    """Returns whether a value is a placeholder."""
    return type(value) is Placeholder


def has_attributes(placeholder: Placeholder) -> bool:
    """Returns whether user code has left something on a placeholder."""
    return len(placeholder.__dict__) > len(_OWN)


def materialize_deferred(placeholder: Placeholder, real: Tensor) -> bool:
    """Turns a placeholder into an ordinary tensor, keeping its identity.

    Args:
        placeholder: Keeps its identity.
        real: Its contents; not to be used afterwards.

    Returns:
        See `materialize_pending`.
    """
    for name in _OWN:
        placeholder.__dict__.pop(name, None)
    return materialize_pending(placeholder, real)

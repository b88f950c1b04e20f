"""Memory that a graph reads its inputs from, and results that outlive the next launch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dynamo_backends._torch_private import disable_current_modes


class Place:
    """Shape, strides and dtype of a tensor, and whether its elements overlap.

    A dimension of stride 0 is held in memory only once.

    Args:
        tensor: Any strided tensor.

    Raises:
        ValueError: Its elements overlap in another way than by strides of 0.
    """

    def __init__(self, tensor: Tensor):
        self.shape = tuple(tensor.shape)
        self.strides = tuple(tensor.stride())
        self._once = tuple(
            slice(0, 1) if n > 1 and not s else slice(None)
            for n, s in zip(self.shape, self.strides, strict=True)
        )
        self._is_expanded = any(s == slice(0, 1) for s in self._once)
        core = self.core(tensor)
        if _overlaps(core):
            raise ValueError(
                f"a tensor of shape {self.shape} and strides {self.strides} has overlapping "
                "elements"
            )
        self._core_shape, self._core_strides = tuple(core.shape), tuple(core.stride())

    def core(self, tensor: Tensor) -> Tensor:
        """Returns a view of such a tensor in which every element of memory occurs once."""
        return tensor[self._once] if self._is_expanded else tensor

    def make(self, like: Tensor) -> Tensor:
        """New memory for a core, of the dtype and on the device of `like`."""
        return torch.empty_strided(
            self._core_shape, self._core_strides, dtype=like.dtype, device=like.device
        )

    def with_core(self, core: Tensor) -> Tensor:
        """Returns the tensor whose core is given."""
        return core.expand(self.shape) if self._is_expanded else core


def _overlaps(tensor: Tensor) -> bool:
    """Returns whether two elements may share memory; exact for views of dense tensors."""
    reach = 0  # the largest offset within the dimensions so far, innermost first
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((s, n) for s, n in dims if n > 1):
        if stride <= reach:
            return bool(tensor.numel())
        reach += stride * (size - 1)
    return False


class StaticInputs:
    """Static buffers from which a CUDA graph reads its inputs.

    Args:
        inputs: Tensors like those to come.

    Attributes:
        tensors: What the graph reads, one per input.
    """

    def __init__(self, inputs: Sequence[Tensor]):
        self._places = [Place(x) for x in inputs]
        # Not an inference tensor, which could not be written to at later calls outside of the mode.
        with torch.inference_mode(False), disable_current_modes():
            self._cores = [p.make(x) for p, x in zip(self._places, inputs, strict=True)]
            self.tensors = [p.with_core(c) for p, c in zip(self._places, self._cores, strict=True)]

    def fill(self, inputs: Sequence[Tensor]) -> None:
        """Copies values in, with as few launches as torch can do it in.

        Raises:
            ValueError: One has another shape than what was recorded; it would be broadcast.
        """
        if self._cores:
            for place, x in zip(self._places, inputs, strict=True):
                if x.shape != place.shape:
                    raise ValueError(f"recorded for {list(place.shape)}, got {list(x.shape)}")
            given = [p.core(x.detach()) for p, x in zip(self._places, inputs, strict=True)]
            with torch.no_grad():
                torch._foreach_copy_(self._cores, given)

    def write_back(self, which: Sequence[int], inputs: Sequence[Tensor]) -> None:
        """Copies slots that the graph has written to back to the tensors that they stand for.

        Args:
            which: Positions among the slots.
            inputs: As for `fill`.
        """
        if which:
            with torch.no_grad():
                torch._foreach_copy_([inputs[i] for i in which], [self._cores[i] for i in which])


class OutputCopies:
    """Copies a CUDA graph's outputs out of its pool, so that they outlive a relaunch.

    Args:
        outputs: In the graph's memory; tensors and other values.
    """

    def __init__(self, outputs: Sequence[object]):
        self._outputs = list(outputs)
        self._tensors = [i for i, x in enumerate(outputs) if isinstance(x, Tensor)]
        tensors = [x for x in outputs if isinstance(x, Tensor)]
        self._places = [Place(x) for x in tensors]
        self._cores = [p.core(x) for p, x in zip(self._places, tensors, strict=True)]

    def copy(self) -> list[object]:
        """Returns what the last launch has computed, copied."""
        results = list(self._outputs)
        if self._cores:
            copies = [p.make(c) for p, c in zip(self._places, self._cores, strict=True)]
            with torch.no_grad():
                torch._foreach_copy_(copies, self._cores)
            for i, place, copy in zip(self._tensors, self._places, copies, strict=True):
                results[i] = place.with_core(copy)
        return results

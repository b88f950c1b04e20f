"""Results of eager with each product in TF32 that torch's settings let be."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dynamo_backends.graph.tf32 import may_be_tf32


class RoundingToTf32(TorchDispatchMode):
    """Rounds the factors of what torch's settings let an NVIDIA GPU compute in TF32.

    Which of a vendor's kernels do is its own choice, and depends on shapes: eager may compute a
    convolution in float32 that a backend computes in TF32, with the same settings.
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls an operator with rounded factors, if its products may be in TF32."""
        if may_be_tf32(func):
            args = pytree.tree_map_only(Tensor, rounded_to_tf32, args)
        return func(*args, **(kwargs or {}))


def rounded_to_tf32(value: Tensor) -> Tensor:
    """Numbers of float32 with the ten bits of mantissa that TF32 has; others as they are."""
    if value.dtype != torch.float32:
        return value
    bits = value.contiguous().view(torch.int32)
    nearest = ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(value.isfinite(), nearest, value)

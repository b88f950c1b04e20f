"""ATen's kernels where they are faster on CPUs than the loops that Inductor writes instead.

This is max pooling of images in training: ATen's kernels, in memory that is channels last (see
`layouts`), work on many channels at a time, where Inductor's loops scatter gradients of maxima one
by one. Gradients of convolutions are ATen's in any case, but so they get the layout that suits
them.

Inductor decomposes these operators, so a graph calls them by other names: each is an operator of
the library `dynamo_backends` with the schema of ATen's, which runs ATen's.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.graph.library import NAMESPACE, declare

aten = torch.ops.aten

_TAGS = {torch.Tag.needs_fixed_stride_order, torch.Tag.nondeterministic_seeded}


def in_place_of(name: str, like: Any, kernel: Callable[..., Any]) -> Any:
    """Declares an operator to be called instead of one of ATen's; arguments as for `declare`."""
    # Inductor gives it the strides of the graph, and not those that were traced (see `layouts`).
    tags = {torch.Tag.needs_fixed_stride_order, *like.tags} & _TAGS
    return declare(name, like, kernel, tags)


def _convolution_backward(*args: Any) -> tuple[Any, ...]:
    """ATen's, but gradients of weights are contiguous, as parameters are."""
    gradient, of_weight, of_bias = aten.convolution_backward.default(*args)
    return gradient, None if of_weight is None else of_weight.contiguous(), of_bias


_in_order: dict[str, Any] = {}
_lock = fork_safe_lock()


def in_order(operator: Any) -> Any:
    """Returns the same operator, but Inductor gives it the strides that the graph gives it.

    Args:
        operator: One of ATen's, or what this function returned.
    """
    namespace, _, name = operator.name().partition("::")
    if namespace == NAMESPACE:
        return operator
    with _lock:
        if name not in _in_order:
            _in_order[name] = in_place_of(name.replace(".", "_"), operator, operator)
        return _in_order[name]


CONVOLUTION_BACKWARD = in_place_of(
    "convolution_backward", aten.convolution_backward.default, _convolution_backward
)
POOLS: Mapping[Any, Any] = {
    pool: in_order(pool)
    for pool in (
        aten.max_pool2d_with_indices.default,
        aten.max_pool2d_with_indices_backward.default,
    )
}
"""From ATen's operators to those that Inductor does not decompose."""


def is_image_on_cpu(value: Any) -> bool:
    """Returns whether a value is a tensor of four dimensions in the memory of the CPU."""
    return isinstance(value, Tensor) and value.ndim == 4 and value.device.type == "cpu"

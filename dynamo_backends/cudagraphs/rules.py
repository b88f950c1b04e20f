"""Which ATen calls can be part of a CUDA graph when torch's own kernels run them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.cudagraphs.device import driver
from dynamo_backends.graph.calls import tensors, unknown_shape
from dynamo_backends.graph.constants import known_value

_TAGS = {
    "cudagraph_unsafe": "torch says that it cannot be part of a CUDA graph",
    "data_dependent_output": "its result is a number on the host, which waits for the device",
}

_WAITS: dict[str, str] = {
    "_assert_scalar": "it checks a number on the host",
    "_linalg_check_errors": "it looks at the result on the host",
    "_linalg_eigvals": "it is computed on the host",
    "_local_scalar_dense": "its result is a number on the host, which waits for the device",
    "bincount": "the host waits for the largest number",
    "histc": "the host waits for the range of its input",
    "is_nonzero": "its result is a number on the host, which waits for the device",
    "linalg_eig": "it is computed on the host",
    "linalg_lstsq": "its kernel waits for the device",
    "multinomial": "the host checks the probabilities",
    "repeat_interleave": "the host waits for the sum of the repetitions",
    "segment_reduce": "the host checks the lengths",
}
"""Operators of ATen whose kernels for CUDA wait for the device, and what for."""

_INDEXED = frozenset(
    {"index.Tensor", "_unsafe_index.Tensor", "index_put.default", "_unsafe_index_put.default"}
)
_MASKS = (torch.bool, torch.uint8)


def why_not(node: fx.Node) -> str | None:
    """Returns why a call cannot be recorded; None if it can."""
    if not isinstance(node.target, OpOverload):
        return "it is not an ATen operator"
    for rule in _RULES:
        reason = rule(node)
        if reason is not None:
            return reason
    return None


def _tagged(node: fx.Node) -> str | None:
    target: Any = node.target
    tags = {tag.name for tag in target.tags}
    return next((reason for name, reason in _TAGS.items() if name in tags), None)


def _waiting(node: fx.Node) -> str | None:
    target: Any = node.target
    namespace, _, name = target._schema.name.partition("::")
    if namespace != "aten":
        return None
    if name == "repeat_interleave" and node.kwargs.get("output_size") is not None:
        return None
    return _WAITS.get(name)


def _masked(node: fx.Node) -> str | None:
    """Indexing by a mask looks for the elements that are set, and the host waits for how many."""
    if str(node.target).removeprefix("aten.") not in _INDEXED:
        return None
    indices: Any = node.args[1] if len(node.args) > 1 else node.kwargs["indices"]
    for index in indices:
        if isinstance(index, fx.Node) and index.meta["val"].dtype in _MASKS:
            return "the host waits for the number of elements that its mask selects"
    return None


def _elsewhere(node: fx.Node) -> str | None:
    """Tensors on other devices: a graph would keep the values that they have while it is recorded.

    Numbers that depend on no input are the exception: they may be baked in by a kernel that takes
    numbers from the host as they are.
    """
    for n in (node, *node.all_input_nodes):
        for tensor in tensors(n.meta.get("val")):
            if tensor.layout is not torch.strided:
                return f"a tensor of it is {tensor.layout}"
            if tensor.device.type != driver().kind and not _is_fixed_number(n, node):
                return f"a tensor of it is on {tensor.device.type}"
    return None


def _is_fixed_number(value: fx.Node, call: fx.Node) -> bool:
    """Whether a value is a number known at compile time that a call can take from the host."""
    if value.meta["val"].ndim or known_value(value) is None:
        return False
    tags = getattr(call.target, "tags", ())
    return value is call or known_value(call) is not None or torch.Tag.pointwise in tags


_RULES: tuple[Callable[[fx.Node], str | None], ...] = (
    _tagged, _waiting, _masked, unknown_shape, _elsewhere,
)  # fmt: skip

"""Arguments whose dtypes eager refuses, and fake tensors do not."""

import re
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import OpOverload, disable_current_modes
from dynamo_backends.graph.call_arguments import collect_tensors, is_pointwise
from dynamo_backends.graph.random_draws import is_random

_REFUSALS = re.compile(
    r"same (data)?type|same dtype|scalar type|dtype to be|type.* should be the same|promoting"
    r"|expected .* dtype|not implemented for '",
    re.IGNORECASE,
)


_NEEDS_MEMORY = re.compile(r"backward|mkldnn|cudnn|miopen|_thnn|_nested")
"""Operators that read what another call has left in memory, which zeros are not."""

_ALL_ALIKE = re.compile(
    r"::_?(linear|addmm|mm|bmm|baddbmm|addbmm|mv|addmv|dot|vdot|addr|convolution)"
)
"""Operators without positions, so that integers of 64 bits beside floats are refused."""


def is_dtype_error(error: BaseException) -> bool:
    """Returns whether an error is a torch operator's refusal of its arguments' dtypes."""
    is_torchs = isinstance(error, RuntimeError | TypeError | NotImplementedError)
    return is_torchs and _REFUSALS.search(str(error)) is not None


def refuse_mixed_dtypes(graph: fx.Graph) -> None:
    """Raises eager's error if a call of the graph mixes dtypes that eager refuses.

    Args:
        graph: Graph of ATen operators, with fake values.

    Raises:
        RuntimeError: Eager's error for the dtypes of a call.
    """
    called: set[Any] = set()
    for node in graph.nodes:
        values = [v for n in node.all_input_nodes for v in collect_tensors(n.meta.get("val"))]
        kind = node.target, tuple((v.dtype, v.ndim) for v in values)
        if kind not in called and _may_refuse(node, values):
            called.add(kind)
            _call_with_zeros(node)


def _may_refuse(node: fx.Node, values: list[Tensor]) -> bool:
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten" or is_pointwise(target):
        return False
    if len(values) != len(node.all_input_nodes) or is_random(node) or target.is_view:
        return False
    if _NEEDS_MEMORY.search(target._schema.name):
        return False
    if any(
        isinstance(a, list | tuple) and any(isinstance(x, fx.Node) for x in a) for a in node.args
    ):
        return False  # of optimizers, which take them all
    floats = {v.dtype for v in values if v.is_floating_point()}
    small = {torch.int32, torch.int16, torch.int8, torch.uint8} & {v.dtype for v in values}
    if floats and _ALL_ALIKE.search(target._schema.name):
        small |= {torch.int64} & {v.dtype for v in values}
    return len(values) > 1 and (len(floats) > 1 or bool(small))


def _call_with_zeros(node: fx.Node) -> None:
    def real(source: fx.Node) -> Any:
        value = source.meta["val"]
        return torch.zeros(value.shape, dtype=value.dtype, device=value.device)

    try:
        with disable_current_modes(), torch.no_grad():
            args, kwargs = fx.map_arg((node.args, node.kwargs), real)
            node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception as error:
        if is_dtype_error(error):
            raise

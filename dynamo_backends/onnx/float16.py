"""Arithmetic of float16 on CPUs: in float32, and rounded after each call, as eager does.

ONNX Runtime computes float16 in float32 there, too, but leaves out the casts that it puts between
two such nodes, and with them those of the model. Casts that the model has around float32 stay.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.graph.call_arguments import collect_call_tensors
from dynamo_backends.graph.call_decomposition import replace_call
from dynamo_backends.graph.call_tracing import CallTraceCache
from dynamo_backends.verify.trials.samples import packet_name

_MOVING = frozenset(
    """_to_copy cat clone convert_element_type copy embedding empty_like flip full_like gather index
    index_put index_select new_empty new_full new_ones new_zeros ones_like roll select_scatter
    slice_scatter stack zeros_like""".split()  # noqa: SIM905
)
"""Operators of which ONNX Runtime has kernels for float16, besides views."""


def compute_in_float32(module: fx.GraphModule) -> None:
    """Inserts casts so that float16 calls on a CPU compute in float32, in place."""
    traces = CallTraceCache()
    for node in list(module.graph.nodes):
        if node.op == "call_function" and _is_arithmetic(node):
            replace_call(node, _in_float32(node.target, _dtypes(node)), traces=traces)


def _is_arithmetic(node: fx.Node) -> bool:
    """Returns whether a call computes float16 numbers on a CPU, not only moves them."""
    target = node.target
    if not isinstance(target, OpOverload) or target.is_view or packet_name(target) in _MOVING:
        return False
    if not node.all_input_nodes or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return any(
        t.dtype == torch.float16 and t.device.type == "cpu" for t in collect_call_tensors(node)
    )


def _dtypes(node: fx.Node) -> tuple[torch.dtype | None, ...]:
    value = node.meta["val"]
    values = value if isinstance(value, list | tuple) else (value,)
    return tuple(v.dtype if isinstance(v, Tensor) else None for v in values)


@functools.cache
def _in_float32(target: OpOverload, dtypes: Sequence[torch.dtype | None]) -> Callable[..., Any]:
    """Wraps a float16 operator: computes in float32 and rounds once, as eager does.

    Args:
        target: The operator.
        dtypes: Of its results.
    """

    def compute(*args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        casts = dtype == torch.float16

        def widen(x: Tensor) -> Tensor:
            if casts and x.is_floating_point():
                x = x.half()
            return x.float() if x.dtype == torch.float16 else x

        args, kwargs = pytree.tree_map_only(Tensor, widen, (args, kwargs))
        if dtype is not None:
            kwargs["dtype"] = torch.float32 if casts else dtype
        result = target(*args, **kwargs)
        if isinstance(result, Tensor):
            return result.to(dtypes[0])
        return type(result)(
            x.to(t) if isinstance(x, Tensor) else x for x, t in zip(result, dtypes, strict=True)
        )

    return compute

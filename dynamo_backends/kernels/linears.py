"""Linear layers by oneDNN instead of MKL where that is faster (CPU, float32).

Inductor gives float32 linear layers with frozen weights to MKL. Which library is faster depends on
the processor (MKL's products are made for Intel's) and on shapes, so it is measured. Calls of
oneDNN's are spelt as Inductor spells them for bfloat16, so it fuses activations into them and
gives them what its packed weights need.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.functional import linear

from dynamo_backends.graph.custom_ops import register_op
from dynamo_backends.kernels.patterns import frozen_nodes, linear_layer
from dynamo_backends.kernels.timing import fastest
from dynamo_backends.runtime.cpu_info import cpu_family
from dynamo_backends.workers.race import Run

aten = torch.ops.aten

_LEAST = 1 << 14  # elements of a weight: below that calls cost more than products


def _pack(weight: Tensor, rows: int) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)
    return packed


PACK = register_op(
    "packed_linear_weight(Tensor weight, int rows) -> Tensor",
    _pack,
    lambda weight, rows: torch.empty_like(weight),
)


def prepacked_linear(weight: Tensor, rows: int) -> Callable[[Tensor], Tensor]:
    """oneDNN's linear layer, as it is called where weights are frozen.

    Args:
        weight: ``(out, in)``.
        rows: That the input will have.
    """
    packed = _pack(weight, rows)
    run: Any = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: run(x, packed, None, "none", [], "")


def multiply_by_onednn(module: fx.GraphModule, ranged: bool = False) -> None:
    """Lets oneDNN compute the linear layers for which it is faster than MKL.

    Args:
        module: Functional; frozen weights are read by `get_attr` nodes.
        ranged: The rows differ from call to call, for which MKL cannot pack weights, and oneDNN
            makes a primitive for each number of rows.
    """
    if not torch.backends.mkldnn.is_available():
        return
    frozen = frozen_nodes(module.graph)
    for node in list(module.graph.nodes):
        parts = linear_layer(node, frozen)
        if parts is None or parts[1].meta["val"].numel() < _LEAST:
            continue
        if _is_faster(parts[0], node, ranged):
            _replace(node, *parts)
    module.recompile()


def _is_faster(x: fx.Node, product: fx.Node, ranged: bool) -> bool:
    (rows, depth), columns = x.meta["val"].shape, product.meta["val"].shape[1]

    def ways() -> dict[str, Run]:
        weight = torch.ones(columns, depth)
        by_onednn = prepacked_linear(weight, rows)
        by_mkl = _unpacked(weight) if ranged else _by_mkl(weight, rows)
        return {
            "MKL": lambda inputs: [by_mkl(inputs[0])],
            "oneDNN": lambda inputs: [by_onednn(inputs[0])],
        }

    layout = ((rows, depth), (depth, 1), torch.float32)
    kind = f"linear layer {columns}{' of any rows' * ranged}"  # oneDNN computes what follows, too
    preferred = "MKL" if ranged else "oneDNN"  # a primitive takes as long as a small product
    safe = "MKL" if cpu_family().startswith("GenuineIntel") else "oneDNN"
    return fastest(kind, "MKL", ways, [layout], preferred, safe) == "oneDNN"


def _by_mkl(weight: Tensor, rows: int) -> Any:
    """Returns the function that Inductor calls: MKL with packed weights, or another BLAS."""
    if not torch.backends.mkl.is_available():
        return _unpacked(weight)
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)
    return lambda x: torch.ops.mkl._mkl_linear(x, packed, weight, None, rows)


def _unpacked(weight: Tensor) -> Any:
    return lambda x: linear(x, weight)


def _replace(node: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None) -> None:
    graph, rows = node.graph, len(x.meta["val"])
    with graph.inserting_before(node):
        turned = graph.call_function(aten.permute.default, (weight, [1, 0]))
        packed = graph.call_function(PACK, (turned, rows))
        call = graph.call_function(
            torch.ops.mkldnn._linear_pointwise.default, (x, packed, bias, "none", [], "")
        )
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    graph.erase_node(node)

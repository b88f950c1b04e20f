"""FLOPs of a graph in convolutions, matrix products and attention.

Graphs are Dynamo's, of torch's functions, or functional ones, of ATen's operators. The fake values
of the nodes say what is counted; sizes that are symbols count as they are in the call that is
compiled.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from dynamo_backends import _torch_private as private

_NAMES: Mapping[str, str] = {
    "convolution": "convolution conv1d conv2d conv3d _convolution conv_transpose1d conv_transpose2d"
    " conv_transpose3d convolution_overrideable",
    "product": "linear matmul mm bmm addmm baddbmm einsum __matmul__ dot mv addmv inner tensordot",
    "attention": "scaled_dot_product_attention multi_head_attention_forward"
    " _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention"
    " _scaled_dot_product_flash_attention",
}
_KINDS = {name: kind for kind, names in _NAMES.items() for name in names.split()}


def compute_flop_features(graph: fx.GraphModule) -> dict[str, float]:
    """Computes log2 of a graph's FLOPs, and their shares by kind, for the cost model.

    Args:
        graph: Its nodes have fake values.

    Returns:
        "flops", the logarithm to base 2 of their number, and the shares of "convolution_work",
        "product_work" and "attention_work" in it, between 0 and 1.
    """
    flops: Counter[str] = Counter()
    for node in graph.graph.nodes:
        if node.op.startswith("call_"):
            name = _name(node.target)
            kind = _KINDS.get(name, "")
            results, operands = list(_tensors(node)), list(_tensors((node.args, node.kwargs)))
            if kind and results and len(operands) > 1:
                flops[kind] += round(_FLOPS[kind](name, operands, results[0]))
    total = max(flops.total(), 1)
    shares = {f"{kind}_work": flops[kind] / total for kind in _NAMES}
    return {"flops": math.log2(total), **shares}


def _of_convolution(name: str, operands: Sequence[Tensor], result: Tensor) -> float:
    x, weight = operands[:2]
    positions = x if "transpose" in name else result
    return 2.0 * _count(positions) * _count(weight) / max(_shape(weight)[0], 1)


def _of_product(name: str, operands: Sequence[Tensor], result: Tensor) -> float:
    left, right = operands[1:3] if name in ("addmm", "baddbmm", "addmv") else operands[:2]
    if name in ("einsum", "tensordot"):
        return 2.0 * math.sqrt(_count(left) * _count(right) * _count(result))
    return 2.0 * _count(result) * max(_shape(left)[-1:] or [1])


def _of_attention(_: str, operands: Sequence[Tensor], __: Tensor) -> float:
    query, key = operands[:2]
    return 4.0 * _count(query) * (_shape(key)[-2:] or [1])[0]


_FLOPS = {"convolution": _of_convolution, "product": _of_product, "attention": _of_attention}


def _name(target: Callable[..., Any] | str) -> str:
    """Returns a target's name without module, overload and in-place suffix."""
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    packet = getattr(target, "overloadpacket", None)
    name = packet.__name__ if packet is not None else name
    return name.removesuffix("_") if not name.endswith("__") else name


def _tensors(of: Any) -> Iterator[Tensor]:
    """Yields the fake tensors of a node, or of the nodes in arguments."""
    if isinstance(of, fx.Node):
        value = of.meta.get("example_value", of.meta.get("val"))
        yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
        return
    for leaf in pytree.tree_leaves(of):
        if isinstance(leaf, fx.Node):
            yield from _tensors(leaf)


def _shape(tensor: Tensor) -> list[int]:
    return [int(private.concretize_number(n) or 0) for n in tensor.shape]


def _count(tensor: Tensor) -> int:
    return math.prod(_shape(tensor))

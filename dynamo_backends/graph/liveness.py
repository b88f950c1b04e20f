"""How much memory the intermediate results of a graph take."""

import math
from typing import Any

from torch import Tensor, fx

from dynamo_backends.graph.aliasing import root


def peak_bytes(graph: fx.Graph) -> int:
    """Memory on the CPU of all results that are alive at once, at most, in bytes.

    Inputs and weights are not counted.

    Args:
        graph: Functional, with static shapes. Each call counts as if it were computed by itself;
            compilers that fuse calls need less.
    """
    steps = [n for n in graph.nodes if n.op in ("call_function", "output")]
    last = {root(used): node for node in steps for used in node.all_input_nodes}
    dying: dict[fx.Node, list[fx.Node]] = {}
    for source, node in last.items():
        dying.setdefault(node, []).append(source)
    sizes: dict[fx.Node, int] = {}
    alive = peak = 0
    for node in steps:
        value = node.meta.get("val")
        is_on_cpu = isinstance(value, Tensor) and value.device.type == "cpu"
        if is_on_cpu and root(node) is node and node in last:
            sizes[node] = tensor_bytes(value)
            alive += sizes[node]
        peak = max(peak, alive)
        alive -= sum(sizes.get(source, 0) for source in dying.get(node, ()))
    return peak


def tensor_bytes(value: Any) -> int:
    """Bytes of the elements of a tensor, or of all tensors of a list."""
    if isinstance(value, Tensor):
        return math.prod(value.shape) * value.element_size()
    if isinstance(value, list | tuple):
        return sum(map(tensor_bytes, value))
    return 0

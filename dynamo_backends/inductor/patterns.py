"""What passes over graphs with frozen weights look for."""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def frozen_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose values depend on weights alone, which `get_attr` nodes read."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        known = node.op == "call_function" and node.all_input_nodes
        if node.op == "get_attr" or (known and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return found


def linear_layer(
    node: fx.Node, frozen: Collection[fx.Node]
) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """Input, weight as in a product, and bias, if a node is a linear layer.

    Args:
        node: Any node.
        frozen: See `frozen_nodes`. Weight and bias are among them; layers in another type than
            float32, and not on a CPU, are none.
    """
    if node.target is aten.addmm.default and not node.kwargs:
        bias, x, weight = node.args
    elif node.target is aten.mm.default:
        bias, (x, weight) = None, node.args
    else:
        return None
    if weight not in frozen or x in frozen or not (bias is None or bias in frozen):
        return None
    values: list[Any] = [None if n is None else n.meta["val"] for n in (x, weight, bias)]  # type: ignore[union-attr]
    given, w, b = values
    if given.device.type != "cpu" or given.dtype != torch.float32:
        return None
    if not given.numel() or not (b is None or b.shape == (w.shape[1],)):
        return None
    return x, weight, bias  # type: ignore[return-value]


def followers(node: fx.Node) -> Iterator[fx.Node]:
    """The only user of a node, that one's only user, and so on."""
    while len(node.users) == 1:
        (node,) = node.users
        yield node


def replace(nodes: list[fx.Node], call: fx.Node) -> None:
    """Lets a call take the place of a chain of nodes, each of which has only the next one as user.

    Args:
        nodes: The chain.
        call: What computes the last one's value.
    """
    last = nodes[-1]
    call.meta = dict(last.meta)
    last.replace_all_uses_with(call)
    for node in reversed(nodes):
        node.graph.erase_node(node)

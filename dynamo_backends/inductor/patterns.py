"""What passes over graphs with frozen weights look for."""

from collections.abc import Iterator

from torch import fx


def frozen_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose values depend on weights alone, which `get_attr` nodes read."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        known = node.op == "call_function" and node.all_input_nodes
        if node.op == "get_attr" or (known and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return found


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

"""What a captured graph does besides computing: which inputs it changes, what its outputs share.

Found on AOT Autograd's functional graph, in which a changed input is an output more, and a view of
a changed input is a view of that output.
"""

from dataclasses import dataclass, field

from torch import fx

from dynamo_backends import _torch_private as private
from dynamo_backends.graph.aliasing import root


@dataclass(frozen=True)
class Alias:
    """An output that shares memory.

    Attributes:
        output: Which output of the captured graph, counted from 0.
        inputs: Names of the inputs whose memory it shares.
        outputs: The other outputs whose memory it shares.
    """

    output: int
    inputs: tuple[str, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Effects:
    """The effects of a captured graph.

    Attributes:
        mutated: Names of the inputs that are written to; AOT Autograd copies the new contents back.
        aliases: One entry per output that shares memory with inputs or other outputs.
    """

    mutated: tuple[str, ...] = field(default=())
    aliases: tuple[Alias, ...] = field(default=())


def effects(graph: fx.Graph) -> Effects:
    """The effects of an inference or forward graph from AOT Autograd."""
    nodes = graph.output_node().args[0]
    places = {private.dynamo_input_index(p): p.name for p in graph.find_nodes(op="placeholder")}
    written: dict[fx.Node, str] = {}
    results: dict[int, fx.Node] = {}
    for node, desc in zip(nodes, graph.output_node().meta.get("desc") or (), strict=False):  # type: ignore[arg-type]
        if not isinstance(node, fx.Node):
            continue
        index = private.mutated_input_index(desc)
        output = private.output_index(desc)
        if index is not None:
            written[root(node)] = places.get(index, f"input {index}")
        elif output is not None:
            results[output] = root(node)
    names = {**{p: p.name for p in graph.find_nodes(op="placeholder")}, **written}
    aliases = []
    for i, base in results.items():
        others = tuple(j for j, other in results.items() if j != i and other is base)
        inputs = (names[base],) if base in names else ()
        if others or inputs:
            aliases.append(Alias(i, inputs, others))
    return Effects(tuple(dict.fromkeys(written.values())), tuple(aliases))

"""The normal form: a functional, decomposed ATen graph whose inputs have roles.

A graph in normal form has only placeholders, `call_function` nodes and one output node. Tensor
constants have become placeholders with the role CONSTANT. Every node's `meta["val"]` tells shape,
strides, dtype and device.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from dynamo_backends._torch_private import lazy_graph_module
from dynamo_backends.graph.roles import Input
from dynamo_backends.graph.text import format_graph
from dynamo_backends.interface.report import Kind


@dataclass(frozen=True)
class Graph:
    """A graph, or a part of one, in normal form.

    Attributes:
        module: Holds the FX graph.
        kind: "inference", "forward" or "backward"; "step" for a whole training step.
        inputs: One entry per placeholder, in order.
    """

    module: fx.GraphModule
    kind: Kind
    inputs: tuple[Input, ...]

    def copy(self) -> "Graph":
        """A graph that may be changed without changing this one."""
        module = lazy_graph_module(self.module, copy_graph(self.module.graph))
        return Graph(module, self.kind, self.inputs)

    @property
    def placeholders(self) -> list[fx.Node]:
        """The placeholder nodes, in order."""
        return [n for n in self.module.graph.nodes if n.op == "placeholder"]

    @property
    def calls(self) -> list[fx.Node]:
        """The `call_function` nodes, in order."""
        return [n for n in self.module.graph.nodes if n.op == "call_function"]

    @property
    def outputs(self) -> Sequence[Any]:
        """What the output node returns: nodes, None, or Python numbers."""
        results: Any = self.module.graph.output_node().args[0]
        return tuple(results)

    def text(self) -> str:
        """The graph as text for people (see `text.format_graph`)."""
        return format_graph(self.module.graph, self.inputs)

    @property
    def weights(self) -> list[int]:
        """Positions of the inputs that are bound once."""
        return [i for i, x in enumerate(self.inputs) if x.frozen]

    @property
    def activations(self) -> list[int]:
        """Positions of the inputs that come with every call."""
        return [i for i, x in enumerate(self.inputs) if not x.frozen]

    @property
    def updates(self) -> dict[int, int]:
        """Positions of the inputs that are updated, and of the outputs that take their places."""
        return {i: x.updated_by for i, x in enumerate(self.inputs) if x.updated_by is not None}


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy with the same node names and its own nodes; `meta` values are shared."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    copy.output_node().meta = dict(graph.output_node().meta)
    return copy


def drop_dead(graph: fx.Graph) -> bool:
    """Erases calls that nobody reads, except those that draw: draws after them would change.

    Returns:
        Whether there were any.
    """
    return graph.eliminate_dead_code(is_impure_node=fx.Node.is_impure)


def source_line(node: fx.Node) -> str | None:
    """The user's line that a node comes from, as "file:line, code"; None if unknown."""
    trace = node.meta.get("stack_trace")
    if not trace:
        return None
    lines = [line.strip() for line in trace.strip().splitlines()]
    for i in range(len(lines) - 1, -1, -1):
        if lines[i].startswith("File "):
            place = lines[i].removeprefix("File ").split(", in ")[0]
            file, _, number = place.partition(", line ")
            code = f", {lines[i + 1]}" if i + 1 < len(lines) else ""
            return f"{file.strip(chr(34))}:{number}{code}"
    return None


def user_lines(graph: fx.Graph, most: int = 12) -> tuple[str, ...]:
    """The user's lines that a graph's calls come from, those with most calls first.

    Args:
        graph: A captured or functional graph.
        most: So many at most.

    Returns:
        Each as "file:line, code".
    """
    lines = (source_line(node) for node in graph.nodes if node.op.startswith("call_"))
    return tuple(line for line, _ in Counter(filter(None, lines)).most_common(most))

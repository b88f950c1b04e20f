"""Runs a functional graph in eager, call by call; nothing is alive for longer than it is needed."""

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from torch import Tensor, fx

from dynamo_backends.graph.eager_calls import compute

Visit = Callable[[int, Any], None]
"""Gets the position of an output and its value, as soon as that is there."""

Call = Callable[[fx.Node, tuple[Any, ...], dict[str, Any]], Any]
"""Computes a call from its arguments."""


def _as_it_is(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return compute(node.target, args, kwargs)


class Replay:
    """A way of computing some outputs of a graph.

    Args:
        module: Holds the graph and what its `get_attr` nodes name; not changed.
        wanted: Positions of the outputs that are computed; None: all.
        graph: Taken instead of the module's own.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        wanted: Collection[int] | None = None,
        graph: fx.Graph | None = None,
    ):
        graph = module.graph if graph is None else graph
        outputs: Any = graph.output_node().args[0]
        self._module = module
        self._placeholders = graph.find_nodes(op="placeholder")
        self._literals: dict[int, Any] = {}
        self._places: dict[fx.Node, list[int]] = {}
        for place, output in enumerate(outputs):
            if wanted is not None and place not in wanted:
                continue
            if isinstance(output, fx.Node):
                self._places.setdefault(output, []).append(place)
            else:
                self._literals[place] = output
        self._order = list(_ordered(graph, self._places))
        self._dying = _dying(self._order)

    def __call__(
        self,
        inputs: Sequence[Any],
        visit: Visit,
        load: Callable[[Any], Any] = lambda value: value,
        call: Call = _as_it_is,
    ) -> None:
        """Runs the graph.

        Args:
            inputs: One per input of the graph.
            visit: Is shown each output, in the order in which they are computed.
            load: Is applied to an input when it is first read.
            call: Computes each call.
        """
        given = dict(zip(self._placeholders, inputs, strict=True))
        values: dict[fx.Node, Any] = {}
        for place, value in self._literals.items():
            visit(place, value)
        for node in self._order:
            if node.op == "placeholder":
                value = given[node]
                value = load(value.detach() if isinstance(value, Tensor) else value)
            elif node.op == "get_attr":
                value = operator.attrgetter(str(node.target))(self._module)
            else:
                args = fx.map_arg(node.args, values.__getitem__)
                kwargs = fx.map_arg(node.kwargs, values.__getitem__)
                value = call(node, args, kwargs)
                del args, kwargs
            for place in self._places.get(node, ()):
                visit(place, value)
            values[node] = value
            del value
            for dead in self._dying.get(node, ()):
                del values[dead]


def _ordered(graph: fx.Graph, wanted: Collection[fx.Node]) -> Iterator[fx.Node]:
    """What has to be computed, each input right before it is read first."""
    needed = _needed(wanted)
    loaded: set[fx.Node] = set()
    for node in graph.nodes:
        if node not in needed or node.op in ("placeholder", "get_attr"):
            continue
        for source in node.all_input_nodes:
            if source.op in ("placeholder", "get_attr") and source not in loaded:
                loaded.add(source)
                yield source
        yield node
    yield from (n for n in wanted if n.op in ("placeholder", "get_attr") and n not in loaded)


def _needed(wanted: Collection[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = list(wanted)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _dying(order: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Returns what nobody needs any more after each node; it may be the node itself."""
    last = {used: node for node in order for used in (*node.all_input_nodes, node)}
    dying: dict[fx.Node, list[fx.Node]] = {}
    for used, node in last.items():
        dying.setdefault(node, []).append(used)
    return dying

"""Autograd nodes of results: what `grad_fn` is in a step, whose results may not be there yet."""

from typing import Any

from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from dynamo_backends._torch_private import accumulation
from dynamo_backends._torch_private.nodes import kind_of_node
from dynamo_backends.aot.step.backward.tape import current_tape, find_edges


class GraphNode:
    """The autograd node of a result; like `torch.autograd.graph.Node`.

    Args:
        passes: The places of user code of its segment.
        number: Of the node, among those that user code has looked at.
        name: As `name` returns it.
    """

    def __init__(self, passes: Any, number: int, name: str):
        self._passes = passes
        self._segment = passes.segment
        self._name = name
        self.number = number
        self.metadata: dict[Any, Any] = {}

    def name(self) -> str:
        """Of the node."""
        return self._name

    def register_hook(self, hook: Any) -> RemovableHandle:
        """As of an autograd node."""
        return self._register(hook, is_before=False)

    def register_prehook(self, hook: Any) -> RemovableHandle:
        """As of an autograd node."""
        return self._register(hook, is_before=True)

    def _register(self, hook: Any, is_before: bool) -> RemovableHandle:
        if self.is_past:  # nobody holds what was computed: no backward pass goes there
            return RemovableHandle({0: hook})
        if self._passes.is_followed:
            handle: RemovableHandle = self._passes.add_node_hook(self.number, hook, is_before)
            return handle
        node = self.real
        handle = node.register_prehook(hook) if is_before else node.register_hook(hook)
        return handle

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        """As of an autograd node."""
        edges = () if self.is_past else find_edges(self.number)
        return tuple((None, 0) if e is None else (self._node(*e[1:]), e[0]) for e in edges)

    def _node(self, target: Any, name: str | None = None) -> Any:
        if name is not None:
            return self._passes.graph_node(target, name)
        if isinstance(target, int):
            return self._passes.context_at(target)
        with self._passes.own_calls():
            return accumulation(target)

    @property
    def is_past(self) -> bool:
        """Returns whether the calls of the step that it belongs to are over."""
        return self._passes.segment is not self._segment

    @property
    def real(self) -> Any:
        """The node itself, where the step runs in eager."""
        return current_tape().nodes[self.number]

    def __getattr__(self, name: str) -> Any:
        """Sends the step on in eager for any other attribute of a node."""
        kind = kind_of_node(self._name)
        if self.is_past or (kind is not None and not hasattr(kind, name)):
            raise AttributeError(f"{self._name!r} object has no attribute {name!r}")
        self._passes.go_eager("looks at the autograd graph (grad_fn)")
        return getattr(self.real, name)

    def __repr__(self) -> str:
        """As of an autograd node."""
        return f"<{self._name} object at {id(self):#x}>"


Node.register(GraphNode)

_KINDS: dict[str, type[GraphNode]] = {}


def graph_node(passes: Any, number: int, name: str) -> GraphNode:
    """Makes a node, whose class has its name."""
    if name not in _KINDS:
        _KINDS[name] = type(name, (GraphNode,), {})
    return _KINDS[name](passes, number, name)

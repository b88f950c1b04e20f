"""Parameters that are alike are updated once while a step is captured.

Optimizers of torch update one parameter after the other, by the same operators for all that have
the same metadata. So one of these is updated in the trace, and its calls are copied for the others.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends.aot.step.method_overrides import override_method
from dynamo_backends.aot.step.program.functionalization import metadata_of
from dynamo_backends.aot.step.state.unsupported_hooks import has_global_hooks

_INDEPENDENT = frozenset(
    {"Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop",
     "Rprop", "SGD"}
)  # fmt: skip
"""Optimizers that update each parameter by its own gradient and state alone."""


@contextlib.contextmanager
def equal_updates(
    optimizer: torch.optim.Optimizer,
    fake_of: Callable[[Tensor], Tensor],
    note_write: Callable[[Tensor], None],
) -> Iterator[None]:
    """Inside, in a trace: an optimizer's step updates one of all parameters that are alike.

    Args:
        optimizer: The optimizer.
        fake_of: Gives the tensor of the trace that stands in for one.
        note_write: Called for each tensor that is written to by a copied call.
    """
    if not _is_independent(optimizer):
        yield
        return
    likes: list[_Likes] = []

    def init_group(original: Callable[..., Any], group: Any, *lists: list[Any]) -> Any:
        result = original(group, *lists)
        with torch._C.DisableTorchFunction():
            likes.extend(_take_first(lists, fake_of))
        return result

    graph = private.graph_being_traced()
    last = next(iter(reversed(graph.nodes)))  # torch 2.12 needs the iter()
    with override_method(optimizer, "_init_group", init_group):
        yield
    _find_calls(likes, _nodes_after(graph, last))
    with torch._C.DisableTorchFunction():
        for each in likes:
            each.copy(graph, note_write)


def _is_independent(optimizer: Any) -> bool:
    kind = type(optimizer)
    is_known = kind.__module__.startswith("torch.optim") and kind.__name__ in _INDEPENDENT
    is_differentiable = any(group.get("differentiable") for group in optimizer.param_groups)
    has_hooks = any(private.tables_of_hooks(optimizer)) or has_global_hooks()
    return is_known and not is_differentiable and not has_hooks


class _Likes:
    """Parameters that are alike, each with its gradient and state.

    Args:
        first: The tensors of the one that is updated in the trace.
        others: Those of the others.

    Attributes:
        nodes: Of the first one's tensors.
        calls: That update it.
    """

    def __init__(self, first: Sequence[Tensor], others: Sequence[Sequence[Tensor]]):
        self._first = first
        self._others = others
        self._versions = [t._version for t in first]
        self.nodes = list(map(private.node_of, first))
        self._nodes_of_others = [list(map(private.node_of, other)) for other in others]
        self.calls: list[fx.Node] = []

    def copy(self, graph: fx.Graph, note_write: Callable[[Tensor], None]) -> None:
        """Updates the others by the same calls."""
        for nodes in self._nodes_of_others:
            copies = dict(zip(self.nodes, nodes, strict=True))
            for call in self.calls:
                copies[call] = graph.node_copy(call, lambda n: copies.get(n, n))  # noqa: B023
        for i, (tensor, version) in enumerate(zip(self._first, self._versions, strict=True)):
            if tensor._version != version:
                for other in self._others:
                    torch.autograd.graph.increment_version(other[i])
                    note_write(other[i])


def _take_first(
    lists: Sequence[list[Any]], fake_of: Callable[[Tensor], Tensor]
) -> Iterator[_Likes]:
    """Leaves the first of those that are alike.

    Args:
        lists: Parameters, gradients, and all that the state consists of, by parameters.
        fake_of: See `equal_updates`.
    """
    filled = [each for each in lists if each]
    if len(set(map(len, filled))) != 1:
        return
    rows = [
        [fake_of(x) if isinstance(x, Tensor) else x for x in row]
        for row in zip(*filled, strict=True)
    ]
    traced = [all(private.node_of(x) is not None for x in _tensors(row)) for row in rows]
    likes: dict[Any, list[int]] = {}
    with private.disable_current_modes():
        storages = Counter(private.storage_id(x) for row in rows for x in _tensors(row))
        for i, row in enumerate(rows):
            is_apart = all(storages[private.storage_id(x)] == 1 for x in _tensors(row))
            kind = tuple(map(_kind_of, row)) if is_apart and traced[i] else i
            likes.setdefault(kind, []).append(i)
    for each in filled:
        each[:] = [each[i] for i, *_ in likes.values()]
    for i, *others in likes.values():
        if others:
            yield _Likes(_tensors(rows[i]), [_tensors(rows[j]) for j in others])


def _tensors(row: Iterable[Any]) -> list[Tensor]:
    return [x for x in row if isinstance(x, Tensor)]


def _kind_of(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return repr(value)
    return metadata_of(value), value.requires_grad, value.is_leaf


def _nodes_after(graph: fx.Graph, last: fx.Node) -> list[fx.Node]:
    nodes = []
    for node in reversed(graph.nodes):
        if node is last:
            break
        nodes.append(node)
    return nodes[::-1]


def _find_calls(likes: Sequence[_Likes], nodes: Iterable[fx.Node]) -> None:
    """Finds the calls that update each of the parameters that are updated."""
    owners = {node: each for each in likes for node in each.nodes}
    for node in nodes:
        found = {owners[n] for n in node.all_input_nodes if n in owners}
        if found:
            (owner,) = found  # each parameter is updated by its own gradient and state
            owners[node] = owner
            owner.calls.append(node)

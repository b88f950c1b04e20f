"""Decompositions that write sizes of one call into what they make of it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import FakeTensorMode
from dynamo_backends.graph.sizes import Size, sizes_in, sizes_of
from dynamo_backends.interface.errors import LoweringError

_TIMES = 3  # odd, so that what has to be even, or a multiple, stays so


def fixes_sizes(node: fx.Node, decompose: Callable[[fx.Node], None]) -> bool:
    """Whether a call is decomposed into others for other sizes; also if that cannot be told.

    Batch normalization, for one, has a factor that follows from the number of elements.

    Args:
        node: For concrete shapes; from a graph with symbolic ones.
        decompose: Replaces a call in its graph.
    """
    sizes = [sizes_of(n) for n in (node, *node.all_input_nodes)]
    if not sizes_in((sizes, node.args, node.kwargs)):
        return False
    try:
        return _decomposed(node, decompose, 1) != _decomposed(node, decompose, _TIMES)
    except LoweringError:
        return True


def _decomposed(node: fx.Node, decompose: Callable[[fx.Node], None], times: int) -> list[str]:
    """The calls that a call of so many times the sizes becomes, as text."""
    graph, mode = fx.Graph(), FakeTensorMode()
    copies: dict[fx.Node, fx.Node] = {}
    for source in node.all_input_nodes:
        copies[source] = graph.placeholder(source.name)
        copies[source].meta = {"val": _resized(source, times, mode)}
    copy = graph.node_copy(node, copies.__getitem__)
    resized = lambda a: int(a) * times if isinstance(a, Size) else a  # noqa: E731
    copy.args = fx.node.map_aggregate(copy.args, resized)
    copy.kwargs = fx.node.map_aggregate(copy.kwargs, resized)
    copy.meta = {"val": node.meta["val"]}
    users = [graph.node_copy(user, lambda _: copy) for user in _readers(node)]
    graph.output(tuple(users or [copy]))
    decompose(copy)
    return [f"{n.target} {n.args} {n.kwargs}" for n in graph.nodes]


def _readers(node: fx.Node) -> list[fx.Node]:
    """What picks results of a call that has several."""
    return [] if isinstance(node.meta["val"], Tensor) else list(node.users)


def _resized(node: fx.Node, times: int, mode: FakeTensorMode) -> Tensor:
    value: Tensor = node.meta["val"]
    order = sorted(range(value.ndim), key=lambda d: (-value.stride()[d], d))
    known: list[Any] = list(sizes_of(node))
    sizes = [
        n * times if isinstance(s, Size) else n for n, s in zip(value.shape, known, strict=True)
    ]
    with mode:
        return torch.empty_permuted(sizes, order, dtype=value.dtype, device=value.device)

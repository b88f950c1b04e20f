"""Calls that are decomposed into others: what is kept of where their sizes come from."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from dynamo_backends.graph.call_decomposition import replace_call
from dynamo_backends.graph.call_tracing import CallTraceCache
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.normalize import normalize
from dynamo_backends.graph.specialize import specialize
from dynamo_backends.graph.symbolic_scalars import has_hardcoded_sizes
from dynamo_backends.graph.symbolic_sizes import (
    SizeWithExpression,
    collect_varying_sizes,
    sizes_of,
    strides_of,
    with_sizes_as_inputs,
)

Function = Callable[[Tensor], Tensor]


def captured(symbolic: bool = True) -> Graph:
    x = torch.randn(3, 4)
    mode = "symbolic" if symbolic else "fake"
    gm = make_fx(lambda x: (x.sin(),), tracing_mode=mode)(x)
    return specialize(normalize(gm, "inference", freeze=False).graph, [x], remember=True)


def replaced(function: Function, symbolic: bool = True) -> Graph:
    """A graph of a sine, with something else in its place."""
    graph = captured(symbolic)
    replace_call(next(n for n in graph.calls if n.target is torch.ops.aten.sin.default), function)
    graph.module.recompile()
    return graph


KEPT: dict[str, Function] = {
    "nothing of sizes": lambda x: x * 0.5 + x.exp(),
    "a shape": lambda x: x.new_ones(x.shape) + x,
    "a product of sizes": lambda x: x.reshape(x.shape[0] * x.shape[1]).exp().reshape(x.shape),
    "a count": lambda x: x.sum() / (x.shape[0] * x.shape[1]) + x,
    "positions": lambda x: torch.arange(x.shape[1], device=x.device) + x,
    "strides": lambda x: x.t().contiguous().t().exp(),
    "a factor": lambda x: x * (1 / x.shape[0]),
    "a quotient": lambda x: x + x.numel() / (x.numel() - 1),
    "a quotient of a quotient": lambda x: x * (1 / (3 * (x.numel() / 2) - 1.0)),
    "a root": lambda x: (x / torch.sym_sqrt(x.shape[1])).exp(),
    "a tensor": lambda x: x + torch.scalar_tensor(x.shape[0] / x.shape[1]),
    "powers and sums": lambda x: x * (x.shape[0] ** -0.5 + 2.5 * x.shape[1]),
    "a size that may be one": lambda x: x.new_ones(x.shape[1] - 1).sum() + x,
    "a slice that may have one row": lambda x: x[1:].exp(),
}


@pytest.mark.parametrize("name", KEPT)
def test_sizes_are_kept(name: str):
    graph = replaced(KEPT[name])
    assert not has_hardcoded_sizes(graph.module.graph)
    complete, sizes = with_sizes_as_inputs(graph)
    x = torch.randn(7, 9)
    known = {
        s.expression: n
        for place in graph.placeholders
        for s, n in zip(sizes_of(place), x.shape, strict=True)
    }
    numbers = [int(size.expression.xreplace(known)) for size in sizes]
    (result,) = complete.module(x, *numbers)
    torch.testing.assert_close(result, KEPT[name](x))
    for node in graph.calls:
        value = node.meta["val"]
        assert sizes_of(node) == tuple(value.shape)
        assert strides_of(node) == value.stride()


@pytest.mark.parametrize("name", KEPT)
def test_without_symbols_there_are_numbers(name: str):
    graph = replaced(KEPT[name], symbolic=False)
    assert not has_hardcoded_sizes(graph.module.graph)
    assert not any(collect_varying_sizes((n.args, n.kwargs)) for n in graph.calls)
    x = torch.randn(3, 4)
    torch.testing.assert_close(graph.module(x)[0], KEPT[name](x))


FORGOTTEN: dict[str, Function] = {
    "a value to fill with": lambda x: x + torch.full_like(x, 1 / x.shape[0]),
    "a quotient that Python may refuse": lambda x: x * (1 / (x.shape[0] - 2)),
    "a root that Python may refuse": lambda x: x * (x.shape[0] - 2) ** 0.5,
    "a factor of what has no dimensions": lambda x: x + x.bfloat16().sum() * (1 / x.shape[0]),
    "what refuses other sizes": lambda x: x.view(3, 4),
    "other calls for some sizes": lambda x: x.exp() if x.shape[0] < 100 else x.cos(),
    "other calls for one size": lambda x: x.exp() if x.shape[0] != 70000 else x.cos(),
    "other calls where sizes are equal": lambda x: x.exp() if x.shape[0] == x.shape[1] else x.cos(),
}


@pytest.mark.parametrize("name", FORGOTTEN)
def test_what_is_for_one_size_alone_is_noted(name: str):
    graph = replaced(FORGOTTEN[name])
    assert has_hardcoded_sizes(graph.module.graph)
    x = torch.randn(3, 4)
    torch.testing.assert_close(graph.module(x)[0], FORGOTTEN[name](x))


def test_bounds_of_sizes_follow_from_those_of_the_inputs():
    graph = replaced(lambda x: x.reshape(x.shape[0] * x.shape[1]).exp().reshape(x.shape))
    (flat,) = {n.meta["val"].numel() for n in graph.calls if n.meta["val"].ndim == 1}
    size = next(s for n in graph.calls for s in sizes_of(n) if s == flat)
    assert isinstance(size, SizeWithExpression)
    assert (size.lower, size.upper) == (4, None)


@pytest.mark.parametrize("symbolic", [False, True])
def test_calls_that_are_alike_are_traced_once(symbolic: bool):
    """Other sizes, strides, dtypes and arguments make others."""
    runs: list[torch.Size] = []

    def added(x: Tensor, y: Tensor | float) -> Tensor:
        runs.append(x.shape)
        return x.exp() + y

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        alike = (x + 1).add(x), (y + 1).add(y)
        others = x.t() + x.t(), x.double() + x.double(), x + 1.0, x + True, x[:2] + x[:2]
        return *alike, *others

    x, y = torch.randn(3, 4), torch.randn(3, 4)
    gm = make_fx(function, tracing_mode="symbolic" if symbolic else "fake")(x, y)
    graph = specialize(normalize(gm, "inference", freeze=False).graph, [x, y], remember=True)
    traces = CallTraceCache()
    calls = [n for n in graph.calls if n.target is torch.ops.aten.add.Tensor]
    for node in calls:
        replace_call(node, added, traces=traces)
    graph.module.recompile()
    assert len(calls) == 9
    assert len(runs) == 7  # literals of other types make other calls
    found = graph.module(x, y)
    expected = [(x.exp() + 1).exp() + x, (y.exp() + 1).exp() + y]
    assert all(map(torch.equal, found, expected))

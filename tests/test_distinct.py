"""Sizes that are equal in each call: united where they have to be, told apart where not."""

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor
from torch.nn import functional as F

import dynamo_backends
from dynamo_backends import Backend, Options
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.symbolic_sizes import SizeWithExpression, sizes_of
from dynamo_backends.pipeline.captured import compile_captured
from dynamo_backends.pipeline.shapes.ranged_programs import distinct_symbol_values
from tests.test_ranges import Counting, Ranged


def compiled(fn: Callable[..., Any], backend: Backend) -> Callable[..., Any]:
    """As users compile: the second call's sizes get symbols, each one of its own."""
    options = Options(cache=False, min_block_size=1)
    run = lambda gm, args: compile_captured(backend, gm, args, options)  # noqa: E731
    return torch.compile(fn, backend=run)


A, B, C = sympy.symbols("a b c")


@pytest.mark.parametrize(
    ("sizes", "ranges", "expected"),
    [
        ({A: 7, B: 7, C: 9}, {A: (2, None), B: (2, None), C: (2, None)}, {A: 7, B: 8, C: 9}),
        ({A: 7, B: 7}, {A: (2, 7), B: (2, 7)}, {A: 7, B: 6}),
        ({A: 7, B: 7}, {A: (7, 7), B: (7, 7)}, None),
        ({A * B: 7, C: 7}, {A * B: (2, None), C: (2, None)}, None),
    ],
    ids=["larger", "smaller", "no room", "no symbol"],
)
def test_sizes_near_those_of_a_call(sizes, ranges, expected):
    assert distinct_symbol_values(sizes, ranges) == expected


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ({A: (2, None), B: (2, None)}, {A: 9, B: 7}),  # A may not be 7, and B is
        ({A: (7, 7), B: (2, None)}, None),
    ],
    ids=["another", "no room"],
)
def test_a_size_that_was_always_the_same_gets_another(ranges, expected):
    assert distinct_symbol_values({B: 7, A: 8}, ranges | {A: ranges[A]}, {A}) == expected


def test_sizes_that_never_vary_are_proven():
    """As the batch of a service whose lengths vary."""
    backend = Counting()
    run = compiled(lambda x: (x * x.shape[0]).sum(1), backend)
    proven = []
    with dynamo_backends.record() as reports:
        for length in (4, 6, 9, 5, 7):
            x = torch.randn(8, length)
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(x, 1)
            torch.testing.assert_close(run(x), (x * x.shape[0]).sum(1))
            proven.append(reports[-1].executable.ranged.proven is not None)
    assert proven == [False, False, True, True, True]
    assert backend.compiled == 1
    torch.testing.assert_close(run(y := torch.randn(3, 5)), (y * 3).sum(1))
    assert backend.compiled == 1, "the batch is another one, and was looked at"


def test_sizes_that_no_call_tells_apart_are_proven():
    """As those of the caches of two layers; from then on nobody looks at new ones."""
    backend = Counting()
    run = compiled(lambda x, y: (x * 2, y.sin().sum()), backend)
    with dynamo_backends.record() as reports:
        for sizes in ((4, 4), (6, 6), (9, 9), (5, 5), (3, 8)):
            x, y = map(torch.randn, sizes)
            torch.testing.assert_close(run(x, y), (x * 2, y.sin().sum()))
            ranged = reports[-1].executable.ranged
            assert (ranged.proven is not None) == (sizes != (4, 4))
    assert backend.compiled == 2, "for the first sizes, and for all"


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, torch.cat([k, q], 2), torch.cat([v, q], 2))


def test_keys_have_as_many_values():
    """torch's shape function of attention does not say so, and Dynamo gives them two symbols."""
    graphs: list[Graph] = []
    backend = Counting()
    backend.compile = lambda graph, options: graphs.append(graph) or Ranged(graph)  # type: ignore
    run = compiled(attention, backend)
    for size in (5, 7, 4, 9):
        q, k, v = torch.randn(1, 2, 1, 8), torch.randn(1, 2, size, 8), torch.randn(1, 2, size, 8)
        torch.testing.assert_close(run(q, k, v), attention(q, k, v))
    _, graph = graphs  # of the first sizes, and of all
    lengths = [size for place in graph.placeholders for size in sizes_of(place)]
    assert len({size.expression for size in lengths if isinstance(size, SizeWithExpression)}) == 1
    with pytest.raises(Exception, match=r"shape|size"):
        run(q, k, v[:, :, 1:])

"""Decompositions that write sizes of one call into what they make of it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from dynamo_backends.graph.decompose import replace
from dynamo_backends.graph.fixed_sizes import fixes_sizes
from dynamo_backends.graph.normalize import normalize
from dynamo_backends.graph.specialize import specialize

DECOMPOSITIONS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "nothing of it": (lambda x: x * 0.5 + x.exp(), False),
    "a factor": (lambda x: x * (1 / x.shape[0]), True),
    "a shape": (lambda x: x.new_ones(x.shape) + x, True),
    "what refuses other sizes": (lambda x: x.view(3, 4), True),
}


def call(symbolic: bool) -> fx.Node:
    x = torch.randn(3, 4)
    mode = "symbolic" if symbolic else "fake"
    gm = make_fx(lambda x: (x.sin(),), tracing_mode=mode)(x)
    graph = specialize(normalize(gm, "inference", freeze=False).graph, [x], remember=True)
    return next(n for n in graph.calls if n.target is torch.ops.aten.sin.default)


@pytest.mark.parametrize("name", DECOMPOSITIONS)
def test_sizes_that_vary(name: str):
    function, expected = DECOMPOSITIONS[name]
    assert fixes_sizes(call(True), lambda node: replace(node, function)) == expected


@pytest.mark.parametrize("name", DECOMPOSITIONS)
def test_without_symbols_nothing_varies(name: str):
    assert not fixes_sizes(call(False), lambda node: replace(node, DECOMPOSITIONS[name][0]))

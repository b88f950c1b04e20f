"""Each row of the table of spellings computes the same bits."""

import operator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from dynamo_backends._torch_private import FakeTensorMode
from dynamo_backends.graph import Graph, Input, Role
from dynamo_backends.graph.canonicalize import IDENTITIES, SPELLINGS, canonicalize
from tests.graph.programs import DTYPES, LAYOUTS, SHAPES, make
from tests.graph.random_graphs import assert_same

aten = torch.ops.aten


def graph_of(target: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Graph:
    """A graph with one call, whose result is doubled so that the call is not the output."""
    graph = fx.Graph()
    place = graph.placeholder("x")
    node = graph.call_function(target, (place, *args), kwargs)
    last = graph.call_function(aten.clone.default, (node,))
    graph.output((last,))
    with FakeTensorMode() as mode:
        place.meta["val"] = mode.from_tensor(x)
        for each in (node, last):
            values = fx.map_arg((each.args, each.kwargs), lambda n: n.meta["val"])
            each.meta["val"] = each.target(*values[0], **values[1])
    module = fx.GraphModule(torch.nn.Module(), graph)
    return Graph(module, "inference", (Input("x", Role.ACTIVATION),))


inputs = st.builds(make, st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.sampled_from(LAYOUTS))
numbers = st.sampled_from((0, 1, 2, -3, 0.5, -1.25, True, 2**40, float("inf")))


@settings(deadline=None, max_examples=25, derandomize=True)
@given(x=inputs, number=numbers)
@pytest.mark.parametrize("old", SPELLINGS, ids=str)
def test_a_spelling_computes_the_same_bits(old: Any, x: torch.Tensor, number: Any):
    new = SPELLINGS[old]
    args: tuple[Any, ...] = (number,)
    if old is aten._unsafe_view.default:
        args = (tuple(x.contiguous().shape),)
        x = x.contiguous()
    elif old is aten.detach.default:
        args = ()
    kwargs = {"rounding_mode": "floor"} if "mode" in str(old) else {}
    try:
        expected = old(x, *args, **kwargs)
    except (RuntimeError, NotImplementedError):  # this dtype has no such operator
        with pytest.raises((RuntimeError, NotImplementedError)):
            new(x, *args, **kwargs)
        return
    graph = graph_of(old, x, *args, **kwargs)
    assert canonicalize(graph)
    assert old not in [n.target for n in graph.calls]
    graph.module.recompile()
    assert_same([expected.clone()], graph.module(x), str(old))


VIEWS = {
    aten.alias.default: (), aten.expand.default: ([2, 3],), aten.permute.default: ([0, 1],),
    aten.slice.Tensor: (0, 0, 2**63 - 1), aten.squeeze.dim: (0,), aten.squeeze.dims: ([0, 1],),
    aten.view.default: ([2, 3],),
}  # fmt: skip


def test_every_view_that_can_change_nothing_is_tried():
    assert set(VIEWS) == IDENTITIES


# VIEWS, a dict, keeps its order from process to process, as pytest-xdist needs; a set does not.
@pytest.mark.parametrize("op", VIEWS, ids=str)
def test_a_view_that_changes_nothing_disappears(op: Any):
    graph = graph_of(op, torch.ones(2, 3), *VIEWS[op])
    assert canonicalize(graph)
    assert [n.target for n in graph.calls] == [aten.clone.default]


@pytest.mark.parametrize(
    ("op", "args"),
    [(aten.expand.default, [4, 2, 3]), (aten.permute.default, [1, 0]), (aten.view.default, [3, 2])],
    ids=str,
)
def test_a_view_that_changes_something_stays(op: Any, args: list[int]):
    graph = graph_of(op, torch.ones(2, 3), args)
    assert not canonicalize(graph)


def test_an_output_stays_a_tensor_of_its_own():
    gm = make_fx(lambda x: (x * 2, aten.alias.default(x * 2)))(torch.ones(2))
    first, second = gm.graph.output_node().args[0]
    second.args = (first,)
    graph = Graph(gm, "inference", (Input(graph_input(gm), Role.ACTIVATION),))
    canonicalize(graph)
    assert graph.outputs[0] is not graph.outputs[1]


def graph_input(gm: fx.GraphModule) -> str:
    return next(n.name for n in gm.graph.nodes if n.op == "placeholder")


@pytest.mark.parametrize(
    ("args", "kwargs", "short_args", "short_kwargs"),
    [
        ((1,), {"alpha": 1}, (1,), {}),
        ((1,), {"alpha": 1.0}, (1,), {"alpha": 1.0}),
        ((), {"other": 1, "alpha": 2}, (1,), {"alpha": 2}),
    ],
)
def test_arguments(args: Any, kwargs: Any, short_args: Any, short_kwargs: Any):
    graph = graph_of(aten.add.Tensor, torch.ones(2), *args, **kwargs)
    canonicalize(graph)
    assert graph.calls[0].args[1:] == short_args
    assert graph.calls[0].kwargs == short_kwargs


def test_a_default_in_the_middle_is_kept():
    graph = graph_of(aten.slice.Tensor, torch.ones(6), 0, None, None, step=2)
    canonicalize(graph)
    assert graph.calls[0].args[1:] == (0, None, None, 2)
    assert operator.eq(graph.calls[0].kwargs, {})

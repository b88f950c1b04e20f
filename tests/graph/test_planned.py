"""Copies of graphs in which a plan's calls are decomposed."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from dynamo_backends import LoweringError
from dynamo_backends.graph.call_decomposition import ORIGIN
from dynamo_backends.graph.decomposition_tables import nested_decomposition_table
from dynamo_backends.graph.graph import Graph, Input, Role
from dynamo_backends.graph.planned_decomposition import (
    compile_decomposed,
    copy_with_decompositions,
    fingerprint_with_plan,
)
from dynamo_backends.interface.plan import Plan

aten = torch.ops.aten
RULES = nested_decomposition_table((), (aten.squeeze.dims,))


def captured(fn: Any, *inputs: Tensor) -> Graph:
    gm = make_fx(fn)(*inputs)
    names = [n.name for n in gm.graph.find_nodes(op="placeholder")]
    return Graph(gm, "inference", tuple(Input(name, Role.ACTIVATION) for name in names))


def fn(x: Tensor) -> list[Tensor]:
    return [torch.nn.functional.hardswish(x.sin()).cos()]


def test_a_copy_is_decomposed_and_the_graph_stays_whole():
    x = torch.randn(3, 4)
    graph = captured(fn, x)
    copy = copy_with_decompositions(graph, ["hardswish"], RULES)
    assert [n.target for n in graph.calls] == [
        aten.sin.default,
        aten.hardswish.default,
        aten.cos.default,
    ]
    assert aten.hardswish.default not in [n.target for n in copy.calls]
    assert {n.meta.get(ORIGIN) for n in copy.calls} == {None, "hardswish"}
    assert "hardswish" not in copy.module.code, "the module runs what its graph says"
    torch.testing.assert_close(copy.module(x), fn(x))


def test_outputs_keep_the_strides_that_torch_promises():
    graph = captured(lambda x: [torch.nn.functional.hardswish(x)], torch.randn(3, 4))
    promised = graph.outputs[0].meta["val"] = torch.empty(4, 3).t()
    (output,) = copy_with_decompositions(graph, ["hardswish"], RULES).outputs
    assert output.meta[ORIGIN] == "hardswish"
    assert output.meta["val"] is promised


def test_an_input_that_stands_for_a_result_must_be_stored_as_that_is():
    graph = captured(lambda x: [aten.native_dropout(x, 0.5, False)[0]], torch.randn(3, 4))
    assert copy_with_decompositions(graph, ["native_dropout"], RULES).outputs[0].op == "placeholder"
    graph.outputs[0].meta["val"] = torch.empty(4, 3).t()
    with pytest.raises(LoweringError, match="whose strides differ from the expected ones"):
        copy_with_decompositions(graph, ["native_dropout"], RULES)


def test_an_error_about_a_part_of_a_call_names_the_call():
    graph = captured(fn, torch.randn(3, 4))

    def fail(copy: Graph) -> None:
        inner = next(n for n in copy.calls if ORIGIN in n.meta)
        raise LoweringError(inner.name, str(inner.target), "it is Tuesday")

    with pytest.raises(LoweringError, match="it is Tuesday") as info:
        compile_decomposed(graph, ["hardswish"], RULES, fail)
    assert info.value.node_name == "hardswish"


def test_what_torch_has_no_rule_for_is_an_error_that_names_it():
    graph = captured(lambda x: [x.sin() @ x], torch.randn(3, 3))
    with pytest.raises(LoweringError, match="torch has no decomposition of it") as info:
        copy_with_decompositions(graph, ["mm"], RULES)
    assert info.value.node_name == "mm"


def test_a_stale_origin_is_forgotten():
    graph = captured(fn, torch.randn(3, 4))
    graph.calls[0].meta[ORIGIN] = "a call of another graph"
    assert not any(ORIGIN in n.meta for n in copy_with_decompositions(graph, (), {}).calls)


def test_a_plan_is_part_of_the_fingerprint():
    graph = captured(fn, torch.randn(3, 4))
    marks = {
        fingerprint_with_plan(graph, Plan(decomposed={name})) for name in ("", "hardswish", "sin")
    }
    assert len(marks) == 3

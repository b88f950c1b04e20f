"""What is kept on disk: OpenVINO's own files, and what damaged ones lead to."""

import pytest
import torch
from torch import nn

import dynamo_backends
from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.errors import CompileError
from dynamo_backends.openvino.compiler import compile_graph, load_executable
from dynamo_backends.openvino.core_api import CompileSettings
from dynamo_backends.openvino.runtime import OpenVinoExecutable
from tests.backend_checks import mlp


@pytest.mark.parametrize("model", [mlp(), nn.Sequential(nn.Sigmoid(), nn.Tanh(), nn.Softmax(-1))])
def test_a_second_compilation_is_read_from_disk(model: nn.Module):
    x = torch.randn(4, 6)
    hits = []
    for _ in range(2):
        torch._dynamo.reset()
        with torch.no_grad(), dynamo_backends.record() as reports:
            torch.testing.assert_close(torch.compile(model, backend="ov")(x), model(x))
        hits.append(sum(r.cache_hits for r in reports))
        assert reports[0].runtime_fallbacks == []
    assert hits == [0, 1]


def test_weights_are_not_part_of_what_is_kept():
    x, first, second = torch.randn(4, 6), mlp(), mlp()
    with torch.no_grad():
        torch.compile(first, backend="ov")(x)
        torch._dynamo.reset()
        with dynamo_backends.record() as reports:
            torch.testing.assert_close(torch.compile(second, backend="ov")(x), second(x))
    assert reports[0].cache_hits == 1


def lowered(model: nn.Module, x: torch.Tensor) -> tuple[Graph, dict[str, bytes]]:
    """The graph that a backend sees of a model, and what its executable leaves on disk."""
    with torch.no_grad(), dynamo_backends.record() as reports:
        torch.compile(model, backend="ov", options={"cache": False})(x)
    graph = reports[0].executable._graph
    return graph, compile_graph(graph, CompileSettings()).dump()


@pytest.mark.parametrize("model", [mlp(), nn.Sequential(nn.Sigmoid(), nn.Tanh(), nn.Softmax(-1))])
def test_damaged_parts_are_refused(model: nn.Module):
    graph, parts = lowered(model, torch.randn(4, 6))
    assert isinstance(load_executable(parts, graph, CompileSettings()), OpenVinoExecutable)
    for name in parts:
        if name == "constants":
            continue
        for damaged in ({**parts, name: parts[name][: len(parts[name]) // 2]}, {}):
            with pytest.raises(CompileError, match="the cached OpenVINO model cannot be used"):
                load_executable(damaged, graph, CompileSettings())

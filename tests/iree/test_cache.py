"""What is kept on disk: programs without weights, and what damaged ones lead to."""

from importlib.metadata import version

import pytest
import torch
from torch import nn

import dynamo_backends
from dynamo_backends import CompileError, GraphReport
from dynamo_backends.interface import protocols
from dynamo_backends.iree.lowering import ENTRY
from dynamo_backends.runtime.cpu_info import cpu_cache_key


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


def run(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, GraphReport]:
    torch._dynamo.reset()
    with torch.no_grad(), dynamo_backends.record() as reports:
        result = torch.compile(model, backend="iree")(x)
    return result, reports[0]


def test_a_second_process_would_find_the_program_whatever_the_weights_are():
    model, x = net(), torch.randn(2, 6)
    first, report = run(model, x)
    assert report.cache_hits == 0
    second, report = run(model, x)
    assert report.cache_hits == 1
    assert torch.equal(first, second)
    third, report = run(other := net(), x)
    assert report.cache_hits == 1
    with torch.no_grad():
        torch.testing.assert_close(third, other(x))
    damage(report, x, first.shape)


def damage(report: GraphReport, x: torch.Tensor, shape: torch.Size) -> None:
    """Damaged parts are refused."""
    (block,) = report.executable.static_program.blocks
    parts = block.executable.dump()
    assert ENTRY.encode() in parts["program"]
    backend = dynamo_backends.get_backend("iree")
    graph, options = report.executable._graph, backend.Options()
    loaded = backend.load(parts, graph, options)
    values = [p.meta["val"] for p in graph.placeholders]
    weights = [torch.zeros(values[i].shape) for i in graph.weights]
    (result,) = loaded.bind(weights)[0]([x])
    assert result.shape == shape
    half = parts["program"][: len(parts["program"]) // 2]
    for damaged in ({"program": parts["program"]}, {**parts, "program": half}):
        with pytest.raises(CompileError, match="the cached IREE program cannot be used"):
            backend.load(damaged, graph, options)


def test_the_key_has_versions_and_processor():
    backend = dynamo_backends.get_backend("iree")
    key = protocols.cache_key(backend, backend.Options())
    assert key is not None
    for package in ("iree-base-compiler", "iree-base-runtime"):
        assert version(package) in key
    assert cpu_cache_key() in key

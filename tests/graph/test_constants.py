"""What is known of a graph before it has inputs."""

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from dynamo_backends.graph import constant_evaluation as known
from dynamo_backends.graph.constant_evaluation import evaluate_constant


def indices(x: Tensor) -> Tensor:
    places = (torch.arange(6) * 0.6).floor().to(torch.int64).clamp(max=3).unsqueeze(-1)
    return x[places]


def calls_of(x: Tensor) -> list[fx.Node]:
    graph = make_fx(indices, tracing_mode="fake")(x).graph
    return [n for n in graph.nodes if n.op == "call_function"]


def test_indices_are_known_and_what_is_looked_up_is_not():
    *before, lookup = calls_of(torch.rand(5))
    value = evaluate_constant(before[-1])
    assert value is not None
    assert value.tolist() == [[0], [0], [1], [1], [2], [3]]
    assert evaluate_constant(lookup) is None


def test_what_is_large_is_not_computed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(known, "LARGEST", 5)
    assert all(evaluate_constant(n) is None for n in calls_of(torch.rand(5)))


def test_what_depends_on_chance_is_not_known():
    graph = make_fx(lambda: torch.randint(5, (3,)) + 1, tracing_mode="fake")().graph
    assert all(evaluate_constant(n) is None for n in graph.nodes)


def test_what_has_a_size_that_depends_on_data_is_not_known():
    def positions() -> Tensor:
        return (torch.arange(6) % 2).nonzero() + 1

    graph = make_fx(positions, tracing_mode="fake")().graph
    found = [evaluate_constant(n) for n in graph.nodes if n.op == "call_function"]
    assert found[0] is not None
    assert found[-1] is None

"""A comparison with eager finds free what programs keep, and leaves nothing to them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.executable import Bound, Executable
from dynamo_backends.runtime import program
from dynamo_backends.verify.first_call import Comparison
from tests.test_ranges import Counting, Ranged, compiled

events: list[str] = []


class Resting(Ranged):
    def bind(self, weights: Any) -> tuple[Bound, Any]:
        run, copied = super().bind(weights)

        def call(values: list[Any]) -> list[Any]:
            events.append("compiled")
            return run(values)

        return call, copied

    def release_memory(self) -> None:
        events.append("rests")


class Keeping(Counting):
    def compile(self, graph: Graph, options: Any) -> Executable:
        return Resting(graph)


def fn(x: Tensor) -> Tensor:
    return x.sin() * 2


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    events.clear()
    replay = Comparison._replay

    def replayed(*args: Any) -> str:
        events.append("eager")
        return replay(*args)

    monkeypatch.setattr(Comparison, "_replay", replayed)
    monkeypatch.setattr(program, "return_free_memory", lambda: events.append("returned"))
    return events


def test_the_first_calls_are_compared_in_the_memory_of_one(noted: list[str]):
    run = compiled(fn, Keeping())
    compared = ["rests", "eager", "returned", "compiled", "returned"]
    for size, expected in ((4, compared), (4, ["compiled"]), (7, compared), (9, ["compiled"])):
        noted.clear()
        x = torch.randn(size)
        torch.testing.assert_close(run(x), fn(x))
        assert noted == expected


def test_a_program_that_is_compared_in_each_call_keeps_its_memory(noted: list[str]):
    run = compiled(fn, Keeping(), verify="always")
    for _ in range(2):
        noted.clear()
        run(torch.randn(4))
        assert noted == ["eager", "compiled"]

"""One program of Inductor's for all sizes, and what it assumed of them."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.symbolic_sizes import with_sizes_as_inputs
from dynamo_backends.inductor.runtime import RangedRun
from tests.test_ranges import Counting, Ranged, compiled

SIZES = ((3, 7), (5, 12), (2, 2), (9, 30), (4, 4))


class Network(nn.Module):
    """Linear layers that are large enough for oneDNN, a norm, a mean over a size."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(128, 160)
        self.norm = nn.LayerNorm(160)
        self.second = nn.Linear(160, 128)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.second(self.norm(self.first(x)).relu())
        return y + torch.arange(x.shape[1])[:, None], y.softmax(1).sum(0) / x.shape[0]


def test_one_program_serves_all_sizes():
    net = Network().eval()
    compiler = dynamo_backends.compiler("inductor_freezing", cache=False, verify="always")
    run = torch.compile(net, backend=compiler, dynamic=True)
    with dynamo_backends.record() as reports, torch.no_grad():
        for size in SIZES:
            x = torch.randn(*size, 128)
            torch.testing.assert_close(run(x), net(x))
        net.first.weight.mul_(2)
        x = torch.randn(6, 6, 128)
        torch.testing.assert_close(run(x), net(x))
    assert [r.executables for r in reports] == [1]
    assert [r.runtime_fallbacks for r in reports] == [[]]


def graph_of_a_view() -> Graph:
    graphs: list[Graph] = []
    backend = Counting()
    backend.compile = lambda graph, options: graphs.append(graph) or Ranged(graph)  # type: ignore
    compiled(lambda x: x.view(x.shape[0] * 2, -1) + 1, backend)(torch.randn(3, 8))
    return with_sizes_as_inputs(graphs[0])[0]


def test_sizes_of_which_an_assumption_does_not_hold_get_programs_of_their_own():
    graph = graph_of_a_view()
    made: list[Any] = []

    def compile_for(inputs: Sequence[Any]) -> Any:
        (x,) = [x for x in inputs if isinstance(x, Tensor)]
        small = bool(x.shape[0] < 10)  # a guard, where that is symbolic
        made.append(x.shape[0])

        def run(*values: Any) -> Any:
            assert small == (values[0].shape[0] < 10), "not the program for these sizes"
            return graph.module(*values)

        return run

    run = RangedRun(graph.placeholders, compile_for)
    for rows in (3, 9, 12, 4, 12, 10):
        x = torch.randn(rows, 8)
        (result,) = run(x, rows * 2)
        torch.testing.assert_close(result, x.view(rows * 2, -1) + 1)
    assert isinstance(made[0], torch.SymInt)
    assert made[1:] == [12, 10]


def test_a_size_of_one_is_not_a_symbol():
    from dynamo_backends.interface.errors import CompileError

    graph = graph_of_a_view()
    for node in graph.placeholders:
        for key in ("sizes", "strides"):
            if key in node.meta:
                node.meta[key] = tuple(_as_one(s) for s in node.meta[key])
        if isinstance(node.meta["val"], Tensor):
            node.meta["val"] = torch.empty(1, 8)
    with pytest.raises(CompileError, match="at least 2"):
        RangedRun(graph.placeholders, lambda inputs: graph.module)


def _as_one(size: Any) -> Any:
    from dynamo_backends.graph.symbolic_sizes import SizeWithExpression

    if isinstance(size, SizeWithExpression) and size == 3:
        return SizeWithExpression(1, size.expression, 0, None)
    return size


def test_a_size_without_symbols_of_its_own_makes_programs_for_each():
    def fn(x: Tensor) -> Tensor:
        return x.reshape(-1).sin() * 2

    compiler = dynamo_backends.compiler(
        "inductor_freezing", cache=False, min_block_size=1, keep_in_eager=("view",), verify="always"
    )
    run = torch.compile(fn, backend=compiler, dynamic=True)
    with dynamo_backends.record() as reports, torch.no_grad():
        for size in ((3, 5), (4, 6)):
            x = torch.randn(size)
            torch.testing.assert_close(run(x), fn(x))
    assert [r.executables for r in reports] == [2]
    assert [r.runtime_fallbacks for r in reports] == [[]]

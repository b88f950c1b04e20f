"""What the pipeline guards against in a backend."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

import dynamo_backends
from dynamo_backends import Availability, Backend, Executable, LoweringError, Options, Support
from dynamo_backends.graph.graph import Graph
from dynamo_backends.pipeline.captured import compile_captured


class Careless(Backend):
    """Destroys the graph that it is given, and fails as it is told to."""

    name = "careless"

    def __init__(self, error: Exception | None):
        self._error = error

    def availability(self) -> Availability:
        return Availability(True, "always")

    def supports(self, node: fx.Node, options: Options) -> Support:
        return Support(True)

    def compile(self, graph: Graph, options: Options) -> Executable:
        output = graph.module.graph.output_node()
        output.args = ((graph.placeholders[0],),)
        graph.module.graph.eliminate_dead_code()
        if self._error is not None:
            raise self._error
        return Failing()


class Failing(Executable):
    """Compiles, and fails at the first call."""

    def bind(self, weights: Sequence[Tensor]) -> Any:
        def run(inputs: list[Tensor]) -> list[Tensor]:
            inputs.clear()
            raise RuntimeError("broken")

        return run, ()


def run(error: Exception | None) -> dynamo_backends.GraphReport:
    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_captured(Careless(error), gm, inputs, Options())

    def fn(x: Tensor) -> Tensor:
        return (x * 2).sin() + 1

    x = torch.randn(3)
    with dynamo_backends.record() as reports:
        compiled = torch.compile(fn, backend=backend)
        for _ in range(2):
            assert torch.equal(compiled(x), fn(x))
    (report,) = reports
    return report


def test_an_error_that_names_no_node_of_the_block_sends_the_block_to_eager():
    report = run(LoweringError("no_such_node", "aten.sin", "it is Tuesday"))
    assert report.blocks == 0
    assert report.ops_in_eager == 3
    assert all("it is Tuesday" in f.reason for f in report.fallbacks)


def test_any_other_error_sends_the_block_to_eager():
    report = run(ZeroDivisionError("oops"))
    assert {f.reason for f in report.fallbacks} == {"ZeroDivisionError: oops"}


def test_eager_is_pristine_though_the_backend_destroyed_its_graph():
    assert run(None).runtime_fallbacks == ["RuntimeError: broken"]


def test_the_size_used_least_recently_leaves():
    compiler = dynamo_backends.compiler("openxla", max_executables=2)
    compiled = torch.compile(lambda x: (x * 2).sin() + 1, backend=compiler, dynamic=True)
    with dynamo_backends.record() as reports:
        for size in (2, 3, 2, 5, 2, 5):
            compiled(torch.randn(size))
        assert reports[0].executables == 3, "5 has displaced 3, not 2"
        compiled(torch.randn(3))
    assert reports[0].executables == 4

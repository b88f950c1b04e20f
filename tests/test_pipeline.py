"""What the pipeline guards against in a backend."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import dynamo_backends
from dynamo_backends import Availability, Backend, Executable, LoweringError, Options, Support
from dynamo_backends.graph.graph import Graph
from dynamo_backends.pipeline.captured import compile_captured
from dynamo_backends.runtime.prepared_executables import UnfrozenExecutable


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
    compiler = dynamo_backends.compiler("openxla", bucket_growth=1, max_executables=2)
    compiled = torch.compile(lambda x: (x * 2).sin() + 1, backend=compiler, dynamic=True)
    with dynamo_backends.record() as reports:
        for size in (2, 3, 2, 5, 2, 5):
            compiled(torch.randn(size))
        assert reports[0].executables == 3, "5 has displaced 3, not 2"
        compiled(torch.randn(3))
    assert reports[0].executables == 4


def test_sizes_run_in_eager_once_programs_leave_before_they_have_paid(
    caplog: pytest.LogCaptureFixture,
):
    compiler = dynamo_backends.compiler("openxla", bucket_growth=1, max_executables=2)
    compiled = torch.compile(lambda x: (x * 2).sin() + 1, backend=compiler, dynamic=True)
    with dynamo_backends.record() as reports:
        for size in (2, 3, 4, 5, 6, 7, 2, 5):
            x = torch.randn(size)
            torch.testing.assert_close(compiled(x), (x * 2).sin() + 1)
    assert reports[0].executables == 4
    calls = {served.by: 0 for served in reports[0].executable.served}
    for served in reports[0].executable.served:
        calls[served.by] += served.calls
    assert calls == {"exact": 5, "eager": 3}, "5 has a program still"
    (text,) = reports[0].failures
    assert "more than twice as many sets occur as the 2 executables that are kept" in text
    assert text in caplog.text


class Decomposing(Careless):
    """Takes hardswish only once it is decomposed, and may dislike what it is decomposed to."""

    def __init__(self, hated: str = ""):
        super().__init__(None)
        self.seen: list[list[str]] = []
        self.hated = hated

    def preserved_operators(self, options: Options) -> Any:
        return (torch.ops.aten.hardswish.default,)

    def supports(self, node: fx.Node, options: Options) -> Support:
        return Support(True, decomposed=node.target is torch.ops.aten.hardswish.default)

    def compile(self, graph: Graph, options: Options) -> Executable:
        self.seen.append([str(n.target) for n in graph.calls])
        for node in graph.calls:
            if str(node.target) == self.hated:
                raise LoweringError(node.name, str(node.target), "it is hated")
        return UnfrozenExecutable(graph, graph.module)


def compiled_by(backend: Decomposing) -> dynamo_backends.GraphReport:
    def fn(x: Tensor) -> Tensor:
        return torch.nn.functional.hardswish(x.sin()).cos()

    def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_captured(backend, gm, inputs, backend.Options(min_block_size=1))

    x = torch.randn(3, 4)
    with dynamo_backends.record() as reports:
        torch.testing.assert_close(torch.compile(fn, backend=compiler)(x), fn(x))
    (report,) = reports
    assert not report.runtime_fallbacks
    return report


def test_a_backend_is_given_what_a_call_is_decomposed_to():
    report = compiled_by(backend := Decomposing())
    (calls,) = backend.seen
    assert "aten.clamp.default" in calls or "aten.clamp_min.default" in calls
    assert "aten.hardswish.default" not in calls
    assert (report.ops_on_backend, report.ops_in_eager) == (3, 0), "counted as they were captured"


def test_an_error_about_a_part_of_a_decomposed_call_costs_that_call_alone():
    report = compiled_by(Decomposing("aten.div.Tensor"))
    (fallback,) = report.fallbacks
    assert (fallback.op, fallback.reason) == ("aten.hardswish.default", "it is hated")
    assert report.ops_on_backend == 2

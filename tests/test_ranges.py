"""One program for all sizes of a range: what shows that it serves them, and what it computes."""

import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor

import dynamo_backends
from dynamo_backends import Availability, Backend, Executable, Options, Support
from dynamo_backends.conformance.traffic import FUNCTIONS, SIZES, agree, halves
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.symbolic_sizes import (
    SizeReader,
    SizeWithExpression,
    with_sizes_as_inputs,
)
from dynamo_backends.interface.registry import get_backend, list_backends
from dynamo_backends.pipeline.captured import compile_captured
from dynamo_backends.verify import first_call


class Ranged(Executable):
    """Runs a graph with torch, for inputs of all sizes."""

    serves_range = True

    def __init__(self, graph: Graph):
        inner, sizes = with_sizes_as_inputs(graph)
        self._module = inner.module
        self._read = SizeReader(graph.placeholders, sizes)

    def bind(self, weights: Sequence[Tensor]) -> tuple[Any, Collection[int]]:
        return lambda values: list(self._module(*values, *self._read(values))), ()


class Counting(Backend):
    """Takes all but some operators, and counts what it compiles."""

    name = "counting"
    serves_ranges = True

    def __init__(self, refused: Collection[str] = ()) -> None:
        self.refused = refused
        self.compiled = 0

    def availability(self) -> Availability:
        return Availability(True, "")

    def supports(self, node: Any, options: Options) -> Support:
        return Support(not any(name in str(node.target) for name in self.refused), "refused")

    def compile(self, graph: Graph, options: Options) -> Executable:
        self.compiled += 1
        return Ranged(graph)


@pytest.fixture(autouse=True)
def many_recompilations() -> Iterator[None]:
    with torch._dynamo.config.patch(recompile_limit=64):
        yield


def compiled(fn: Callable[..., Any], backend: Backend, **settings: Any) -> Callable[..., Any]:
    options = Options(cache=False, min_block_size=1, freezing="off", **settings)
    return torch.compile(
        fn,
        backend=lambda gm, args: compile_captured(backend, gm, args, options),
        dynamic=True,
    )


PROGRAMS = {"halves": 2, "last": 2, "half": 5, "filled": 7}
"""Of functions whose graph is another one where a size is 1, or has numbers made of sizes."""


@pytest.mark.parametrize("refused", [(), ("relu", "add", "mul", "sum"), ("view", "arange", "cat")])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_program_serves_all_sizes(name: str, refused: Collection[str]):
    backend = Counting(refused)
    run = compiled(FUNCTIONS[name], backend, verify="always", fallback="eager")
    programs = set()
    for size in SIZES:
        x = torch.randn(size)
        agree(run(x), FUNCTIONS[name](x))
        programs.add(backend.compiled)
    assert len(programs - {0}) <= PROGRAMS.get(name, 1)


def test_a_program_is_proven_by_sizes_that_tell_all_expressions_apart():
    from dynamo_backends.pipeline.shapes import ranged_programs

    seen = []
    backend = Counting()
    run = compiled(lambda x, y: x.t() @ x + y + x.shape[0] * 2, backend)
    original = ranged_programs.RangedPrograms.find_for_graph

    def serving(self: ranged_programs.RangedPrograms, graph: Graph) -> Any:
        program = original(self, graph)
        seen.append(self.proven is not None)
        return program

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranged_programs.RangedPrograms, "find_for_graph", serving)
        for rows, columns in ((4, 8), (6, 12), (6, 5), (9, 9), (3, 8)):
            x, y = torch.randn(rows, columns), torch.randn(columns)
            torch.testing.assert_close(run(x, y), x.t() @ x + y + x.shape[0] * 2)
    assert seen == [False, True], "twice as many in both; told apart; then nobody asks"
    assert backend.compiled == 1


def test_examples_of_two_threads_do_not_mix(monkeypatch: pytest.MonkeyPatch):
    """Two expressions that are always equal are never told apart."""
    from dynamo_backends.pipeline.shapes import padded_programs, ranged_programs

    rows, columns = sympy.symbols("rows columns")

    def sizes(graph: Any) -> list[SizeWithExpression]:
        return [SizeWithExpression(graph.number, e, 2, None) for e in (rows, columns)]

    def sized(number: int) -> Any:
        return SimpleNamespace(number=number, module=SimpleNamespace(graph=None))

    monkeypatch.setattr(ranged_programs, "inner_varying_sizes", sizes)
    monkeypatch.setattr(ranged_programs, "specialize_distinct_sizes", lambda *_: None)
    monkeypatch.setattr(ranged_programs, "has_hardcoded_sizes", lambda graph: False)
    programs: Any = padded_programs.PaddedPrograms.__new__(padded_programs.PaddedPrograms)
    programs._proofs, programs._proven, programs._symbols = {}, "", None
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: programs._note("graph", sized(number)), range(2, 800)))
    finally:
        sys.setswitchinterval(interval)
    assert not programs._proven
    assert len(programs._proofs["graph"]._examples) == 798, "each is noted once"


def rows_compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the rows of the first input of each call that is compared with eager."""
    rows: list[int] = []
    original = first_call.Comparison.__call__

    def compare(self: Any, run: Any, inputs: Sequence[Any]) -> Any:
        rows.append(inputs[0].shape[0])
        return original(self, run, inputs)

    monkeypatch.setattr(first_call.Comparison, "__call__", compare)
    return rows


def test_the_first_call_of_other_sizes_is_compared_with_eager(monkeypatch: pytest.MonkeyPatch):
    compared = rows_compared(monkeypatch)
    run = compiled(lambda x: x * 2 + 1, Counting())
    for size in (4, 4, 6, 6, 9, 20):
        run(torch.randn(size))
    assert compared == [4, 6]


class WrongElsewhere(Ranged):
    """Right for the sizes that it was compiled for, and for no others."""

    def __init__(self, graph: Graph):
        super().__init__(graph)
        self._shape = graph.placeholders[-1].meta["val"].shape

    def bind(self, weights: Sequence[Tensor]) -> tuple[Any, Collection[int]]:
        run, copied = super().bind(weights)

        def spoiled(values: list[Tensor]) -> list[Tensor]:
            right = values[-1].shape == self._shape
            return [r if right else r + 1 for r in run(values)]

        return spoiled, copied


@pytest.mark.plants_errors
def test_what_is_wrong_for_other_sizes_is_found_at_once(caplog: pytest.LogCaptureFixture):
    backend = Counting()
    backend.compile = lambda graph, options: WrongElsewhere(graph)  # type: ignore[method-assign]
    run = compiled(lambda x: x.sin() * 2, backend)
    for size in (4, 7, 9, 4):
        x = torch.randn(size)
        torch.testing.assert_close(run(x), x.sin() * 2)
    assert "computed a wrong result" in caplog.text


def test_programs_of_one_number_each_do_not_pile_up():
    from dynamo_backends.pipeline.shapes import ranged_programs

    made: list[ranged_programs.RangedPrograms] = []
    original = ranged_programs.RangedPrograms.__init__

    def note(self: ranged_programs.RangedPrograms, *arguments: Any) -> None:
        original(self, *arguments)
        made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranged_programs.RangedPrograms, "__init__", note)
        run = compiled(
            lambda x: x + torch.full((1,), 12 / x.shape[0]), Counting(), max_executables=3
        )
        for size in range(2, 12):
            assert run(torch.zeros(size)).tolist() == [pytest.approx(12 / size)] * size
    assert [len(each._programs) for each in made] == [3]


def test_strides_of_views_may_be_symbols_of_their_own():
    from dynamo_backends.inductor.runtime import RangedRun

    graphs: list[Graph] = []
    backend = Counting()
    backend.compile = lambda graph, options: graphs.append(graph) or Ranged(graph)  # type: ignore
    run = compiled(lambda x: x * 2, backend)
    for rows, columns in ((4, 6), (5, 9)):
        x = torch.randn(rows, columns + 3)[:, :columns]
        torch.testing.assert_close(run(x), x * 2)
    (graph,) = graphs
    shapes: list[Any] = []
    RangedRun(graph.placeholders, lambda inputs: shapes.extend(inputs) or graph.module)  # type: ignore
    (view,) = [x for x in shapes if isinstance(x, Tensor)]
    assert str(view.stride(0)) not in map(str, view.shape)


def test_reports_name_the_symbols():
    with dynamo_backends.record() as reports:
        run = compiled(lambda x: x * 2 + 1, Counting())
        for size in (4, 6, 9):
            run(torch.randn(size, 3))
    (compilation,) = reports[0].compilations
    (shape,) = compilation.shapes
    assert re.fullmatch(r"x: float32\[s\d+, s\d+\]", shape)


def test_gradients_of_all_sizes():
    weight = torch.randn(6, 6, requires_grad=True)

    def loss(x: Tensor) -> Tensor:
        y = (x @ weight).view(x.shape[0] * 2, -1).softmax(-1)
        return (y.sum(0) * y[: x.shape[0]].mean(0)).sum()

    backend = Counting()
    run = compiled(loss, backend, verify="always")
    for size in (3, 8, 5, 40, 12):
        x = torch.randn(size, 6, requires_grad=True)
        expected = torch.autograd.grad(loss(x), (x, weight))
        found = torch.autograd.grad(run(x), (x, weight))
        torch.testing.assert_close(found, expected)
    assert backend.compiled == 2, "forward, backward"


def test_a_size_that_does_not_follow_is_refused():
    from dynamo_backends.interface.errors import CompileError

    graphs: list[Graph] = []
    backend = Counting()
    backend.compile = lambda graph, options: graphs.append(graph) or Ranged(graph)  # type: ignore
    compiled(halves, backend)(torch.randn(3, 8))
    (graph,) = graphs
    sizes = with_sizes_as_inputs(graph)[1]
    values = [place.meta["val"] for place in graph.placeholders]
    assert SizeReader(graph.placeholders, [*sizes, 7])(values)[-1] == 7
    with pytest.raises(CompileError, match="does not follow"):
        SizeReader(graph.placeholders[:0], sizes)


def test_the_page_on_sizes_names_the_backends_that_serve_ranges():
    page = (Path(__file__).parents[1] / "docs" / "shapes.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith(("| **One", "| One executable"))]
    told = set(re.findall(r"`(\w+)`", " ".join(rows[:2]))) - {"max_size"}
    variants = {name for name in list_backends() if get_backend(name).same_as in told}
    serving = {name for name in list_backends() if get_backend(name).serves_ranges}
    assert serving - variants == told - variants


def test_numbers_alone_as_inputs():
    def positions(n: int) -> Tensor:
        return torch.arange(n) * 2 + n

    run = compiled(positions, Counting())
    for n in (5, 9, 4):
        torch.testing.assert_close(run(n), positions(n))

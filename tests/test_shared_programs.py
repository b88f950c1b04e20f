"""A program for a range takes the calls of the graph that the function was at first."""

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends import Executable, Options
from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.registry import get_backend
from dynamo_backends.pipeline.captured import compile_captured
from dynamo_backends.pipeline.shapes import shared_programs
from dynamo_backends.pipeline.shapes.shared_programs import SuccessorProgram
from tests.backend_checks import usable
from tests.test_ranges import Counting, rows_compared


class Succeeding(Counting):
    """Knows which of its executables are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Executable]] = []

    def compile(self, graph: Graph, options: Options) -> Executable:
        executable = super().compile(graph, options)
        self.made.append(weakref.ref(executable))
        return executable

    @property
    def alive(self) -> list[bool]:
        """Which of the executables are still there."""
        gc.collect()
        return [ref() is not None for ref in self.made]


def compiled(fn: Callable[..., Any], backend: Counting, **settings: Any) -> Callable[..., Any]:
    options = Options(cache=False, min_block_size=1, freezing="off", **settings)
    return torch.compile(fn, backend=lambda gm, args: compile_captured(backend, gm, args, options))


def of_two(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y).relu().view(x.shape[0] * y.shape[1]) * 2 + x.new_ones(()) / 4


def test_the_program_of_the_first_sizes_goes():
    backend = Succeeding()
    run = compiled(of_two, backend, verify="always")
    for rows, columns in ((4, 5), (7, 5), (4, 5), (9, 5), (4, 8), (4, 5), (7, 5)):
        x, y = torch.randn(rows, 3), torch.randn(3, columns)
        torch.testing.assert_close(run(x, y), of_two(x, y))
    assert backend.alive == [False, True, True], "any number of rows; then of columns, too"


def test_all_its_calls_are_those_of_the_range():
    backend = Succeeding()
    with dynamo_backends.record() as reports:
        run = compiled(of_two, backend)
        for rows in (4, 7, 4):
            x, y = torch.randn(rows, 3), torch.randn(3, 5)
            torch.testing.assert_close(run(x, y), of_two(x, y))
    static, ranged = reports
    assert isinstance(static.executable._static, SuccessorProgram)
    assert static.executable.static_program is None
    assert ranged.executable.ranged.proven is not None, "the first sizes are a second example"


def test_the_first_call_of_the_first_sizes_is_compared_with_eager(
    monkeypatch: pytest.MonkeyPatch,
):
    compared = rows_compared(monkeypatch)
    with dynamo_backends.record() as reports:
        run = compiled(lambda x: x * 2 + 1, Succeeding())
        for size in (4, 6, 9):
            run(torch.randn(size))
    for _ in range(2):  # Dynamo asks the guards of the second graph first, as long as it is hit
        x = torch.randn(4)
        torch.testing.assert_close(reports[0].executable([x])[0], x * 2 + 1)
    assert compared == [4, 6, 4]


class Exact(Succeeding):
    serves_ranges = False


@pytest.mark.parametrize("settings", [{}, {"ranges": False}])
def test_the_first_sizes_keep_their_program_where_each_has_its_own(settings: Any):
    backend = Exact()
    with dynamo_backends.record() as reports:
        run = compiled(of_two, backend, verify="always", **settings)
        for rows, columns in ((4, 5), (7, 5), (4, 5), (4, 8), (7, 5), (4, 5)):
            x, y = torch.randn(rows, 3), torch.randn(3, columns)
            torch.testing.assert_close(run(x, y), of_two(x, y))
    assert [r.executables for r in reports] == [1, 1, 2], "the second graph's are its own"
    taken = [s for r in reports[1:] for s in r.traffic() if not s.executables]
    assert [(s.by, s.calls) for s in taken] == [("exact", 1), ("exact", 1)]


@pytest.mark.parametrize(
    ("fn", "settings"),
    [
        (lambda x: x.long() + x.shape[0], {}),
        (lambda x: x * 2 if x.shape[0] > 5 else x * 3, {}),
        (lambda x: x * 2, {"ranges": False}),
    ],
    ids=["a size as a number", "another graph", "no ranges"],
)
def test_a_program_that_does_not_serve_the_first_sizes_leaves_them(fn: Any, settings: Any):
    backend = Succeeding()
    run = compiled(fn, backend, **settings)
    for size in (4, 7, 8):
        x = torch.randn(size)
        torch.testing.assert_close(run(x), fn(x))
    assert backend.alive[0]


def test_first_sizes_that_later_guards_do_not_admit_keep_their_program(
    monkeypatch: pytest.MonkeyPatch,
):
    """The graph with symbols is for two pieces, and the first sizes make three."""

    def in_twos(x: Tensor) -> tuple[Tensor, Tensor]:
        sizes = torch.full((x.shape[1],), x.shape[1] / 4)
        return x + sizes, torch.split(sizes, 2)[0]

    monkeypatch.setenv("DYNAMO_BACKENDS_CHECK", "1")
    options = {"cache": False, "min_block_size": 1, "fragmented": "keep", "verify": "off"}
    with dynamo_backends.record() as reports:
        run = torch.compile(in_twos, backend=usable("onnxrt"), options=options)
        for size in (6, 4, 6):
            x = torch.randn(size, size)
            torch.testing.assert_close(run(x), in_twos(x))
    static, _ = reports
    assert static.executable.static_program is not None
    assert not any(report.events for report in reports), "nothing failed"


def test_sizes_out_of_the_range_stay():
    backend = Succeeding()
    run = compiled(lambda x: x * 2, backend)
    x, y = torch.randn(4), torch.randn(12)
    torch._dynamo.mark_dynamic(y, 0, min=8, max=64)
    for given in (x, y, x, y):
        torch.testing.assert_close(run(given), given * 2)
    assert backend.alive == [True, True]


def test_constants_are_compared():
    """Two modules of one class: their graphs differ in nothing but the values of a constant."""

    class Scaled(nn.Module):
        def __init__(self, scale: float):
            super().__init__()
            self.scale = scale

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.tensor([self.scale, 1.0])

    backend = Succeeding()
    for scale in (2.0, 3.0):
        run = compiled(Scaled(scale), backend)
        for rows in (4, 7, 4):
            x = torch.randn(rows, 2)
            torch.testing.assert_close(run(x), x * torch.tensor([scale, 1.0]))


@pytest.mark.parametrize(
    ("first", "second", "are_equal"),
    [
        ([0.0, math.nan], [0.0, math.nan], True),
        ([0.0, 1.0], [-0.0, 1.0], False),
        ([1.0], [1], False),
        ([1j], [1j], True),
    ],
)
def test_constants_are_equal_bit_by_bit(first: Any, second: Any, are_equal: bool):
    assert shared_programs._equal(torch.tensor(first), torch.tensor(second)) == are_equal


@pytest.mark.parametrize("name", ["onnxrt", "ov"])
def test_vendors_keep_one_executable(name: str):
    available = get_backend(name).availability()
    if not available.usable:
        pytest.skip(available.reason)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)).eval()
    run = torch.compile(model, backend=dynamo_backends.compiler(name, cache=False))
    with dynamo_backends.record() as reports, torch.no_grad():
        torch.testing.assert_close(run(x := torch.randn(4, 3, 4, 4)), model(x))
        (block,) = reports[0].executable.static_program.blocks
        gone = [weakref.ref(x) for x in (block.executable, block._bind.__self__)]
        del block
        gc.disable()  # memory is free at once, not when garbage is collected
        try:
            for batch in (6, 4, 9):
                x = torch.randn(batch, 3, 4, 4)
                torch.testing.assert_close(run(x), model(x))
            assert [ref() for ref in gone] == [None, None]
        finally:
            gc.enable()
    assert [isinstance(r.executable._static, SuccessorProgram) for r in reports] == [True, False]
    assert [r.runtime_fallbacks for r in reports] == [[], []]


def test_gradients_of_the_first_sizes_once_they_are_those_of_the_range():
    backend = Succeeding()
    weight = torch.randn(3, 2, requires_grad=True)
    run = compiled(lambda x: (x @ weight).tanh().sum(0), backend, verify="always")
    for rows in (4, 7, 4, 9, 4):
        x = torch.randn(rows, 3, requires_grad=True)
        found = torch.autograd.grad(run(x).sum(), (x, weight))
        expected = torch.autograd.grad((x @ weight).tanh().sum(), (x, weight))
        torch.testing.assert_close(found, expected)


class Sharing(Succeeding):
    depends_on_ranges = False


class Narrow(Sharing):
    """Its executables hold for the range that they were compiled for."""

    depends_on_ranges = True


def apart_at_ten(x: Tensor) -> Tensor:
    """Is captured once for fewer than ten rows and once for more; the graphs are equal."""
    if x.shape[0] < 10:
        return (x @ x.T).relu() + 1
    return (x @ x.T).relu() + 1


@pytest.mark.parametrize(("kind", "executables"), [(Sharing, 1), (Narrow, 2)])
def test_ranges_that_were_captured_apart(kind: type[Sharing], executables: int):
    backend = kind()
    with dynamo_backends.record() as reports:
        run = compiled(apart_at_ten, backend, verify="always")
        for rows in (20, 30, 4, 5, 6, 25, 9):
            x = torch.randn(rows, 3)
            torch.testing.assert_close(run(x), apart_at_ten(x))
    assert len(reports) == 3, "the first size, and both ranges"
    assert sum(backend.alive) == executables
    narrow = reports[-1]
    assert sum(served.calls for served in narrow.traffic()) == 4
    assert narrow.ops_on_backend == reports[1].ops_on_backend > 0
    assert narrow.blocks == 1
    assert narrow.executables == executables - 1
    assert narrow.executable.ranged.proven is not None


def test_a_shared_program_is_compared_at_its_first_sizes(monkeypatch: pytest.MonkeyPatch):
    compared = rows_compared(monkeypatch)
    run = compiled(apart_at_ten, Sharing())
    for rows in (20, 30, 40, 4, 5, 6):
        run(torch.randn(rows, 3))
    assert compared == [20, 30, 4, 5], "what is proven is not compared"


def test_programs_go_with_their_graphs() -> None:
    backend = Sharing()
    run = compiled(apart_at_ten, backend)
    for rows in (20, 30, 4, 5):
        run(torch.randn(rows, 3))
    assert any(backend.alive)
    del run
    torch._dynamo.reset()
    assert not any(backend.alive)


class WrongBelowTen(Sharing):
    name = "wrong"

    def compile(self, graph: Graph, options: Options) -> Executable:
        executable = super().compile(graph, options)
        bind = executable.bind

        def bound(weights: Any) -> Any:
            run, copied = bind(weights)
            return lambda v: [y + (v[0].shape[0] < 10) for y in run(v)], copied

        executable.bind = bound  # type: ignore[method-assign]
        return executable


@pytest.mark.plants_errors
def test_a_shared_program_that_is_wrong_says_so_for_both_graphs():
    backend = WrongBelowTen()
    with dynamo_backends.record() as reports:
        run = compiled(apart_at_ten, backend)
        for rows in (20, 30, 4, 5, 30):
            x = torch.randn(rows, 3)
            torch.testing.assert_close(run(x), apart_at_ten(x))
    assert [[event.kind for event in r.events] for r in reports] == [[], ["wrong"], ["wrong"]]


def test_other_weights_are_no_other_range() -> None:
    backend = Sharing()
    for width in (2, 3):
        layer = nn.Linear(3, width)
        run = compiled(layer, backend)
        for rows in (4, 7, 9):
            x = torch.randn(rows, 3)
            torch.testing.assert_close(run(x), layer(x))

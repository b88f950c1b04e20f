"""Sizes that come often get an executable of their own, if that is faster than the one for all."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import dynamo_backends
from dynamo_backends import Executable, Options
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.roles import Input, Role
from dynamo_backends.graph.sizes import is_ranged
from dynamo_backends.interface.errors import CompileError
from dynamo_backends.interface.report import GraphReport, Served, record
from dynamo_backends.pipeline import background
from dynamo_backends.pipeline.captured import compile_captured
from dynamo_backends.pipeline.shapes import frequent
from tests.test_ranges import Counting, Ranged

SLOW_S, FAST_S = 0.004, 0.0005


class Clock(threading.local):
    """Stands in for `time`: each thread has seconds of its own, which pass in programs alone."""

    seconds = 0.0

    def perf_counter(self) -> float:
        """Now."""
        return self.seconds


CLOCK = Clock()


class Slowed(Ranged):
    """Takes its time by the clock, and adds something."""

    def __init__(self, graph: Graph, seconds: float, more: float = 0.0):
        super().__init__(graph)
        self._seconds, self._more = seconds, more

    def bind(self, weights: Sequence[Tensor]) -> tuple[Any, Any]:
        run, copied = super().bind(weights)

        def slowly(values: Sequence[Tensor]) -> list[Tensor]:
            CLOCK.seconds += self._seconds
            return [y + self._more for y in run(values)]

        return slowly, copied


class Paced(Counting):
    """Its program for all sizes is slow; notes for which sizes it compiled others."""

    def __init__(self, exact_s: float = FAST_S):
        super().__init__()
        self.exact_s = exact_s
        self.exact: list[tuple[int, ...]] = []
        self.more = 0.0
        self.error: Exception | None = None

    def compile(self, graph: Graph, options: Options) -> Executable:
        self.compiled += 1
        if is_ranged(graph.module.graph):
            return Slowed(graph, SLOW_S)
        self.exact += [tuple(p.meta["val"].shape) for p in graph.placeholders][-1:]
        if self.error is not None:
            raise self.error
        return Slowed(graph, self.exact_s, self.more)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compilations pay at once; times are those of `CLOCK`, so no other process changes them."""
    monkeypatch.setattr(frequent, "time", CLOCK)
    monkeypatch.setattr(frequent.FrequentSizes, "_pays", lambda _, gained: gained > 0)
    monkeypatch.setattr(frequent, "EVERY", 2)
    monkeypatch.setattr(frequent, "TURNS", 3)
    yield
    assert background.wait(60)


def function(x: Tensor) -> Tensor:
    return (x * 2).relu().sum(1)


def compiled(backend: Counting, **settings: Any) -> Callable[..., Any]:
    options = Options(**{"cache": False, "min_block_size": 1, **settings})
    return torch.compile(
        function,
        backend=lambda gm, args: compile_captured(backend, gm, args, options),
        dynamic=True,
    )


def calls(run: Callable[..., Any], rows: int, count: int) -> None:
    for _ in range(count):
        x = torch.randn(rows, 5)
        torch.testing.assert_close(run(x), function(x))
        assert background.wait(60)


def served(reports: Sequence[GraphReport]) -> dict[str, int]:
    """Calls by what served them."""
    (report,) = reports
    found: dict[str, int] = {}
    for row in report.traffic():
        found[row.by] = found.get(row.by, 0) + row.calls
    return found


def proven(run: Callable[..., Any]) -> None:
    """Calls until one program serves all sizes."""
    for rows in (3, 4, 6):
        calls(run, rows, 1)


def test_sizes_that_come_often_are_served_by_the_faster_program():
    backend = Paced()
    run = compiled(backend)
    with record() as reports:
        proven(run)
        calls(run, 7, 30)
        before = served(reports)
        calls(run, 7, 5)
        after = served(reports)
    assert backend.exact == [(7, 5)]
    assert after["exact"] == before["exact"] + 5
    assert after["ranged"] == before["ranged"]
    with record() as reports:
        calls(run, 9, 1)
    assert backend.exact == [(7, 5)], "other sizes have the program for all"


def test_what_is_no_faster_leaves_and_two_are_enough():
    backend = Paced(exact_s=SLOW_S)
    run = compiled(backend)
    with record() as reports:
        proven(run)
        for rows in (7, 8, 9, 10):
            calls(run, rows, 25)
        before = served(reports)
        calls(run, 7, 5)
        after = served(reports)
    assert backend.exact == [(7, 5), (8, 5)]
    assert after["exact"] == before["exact"]


@pytest.mark.plants_errors
def test_a_wrong_one_serves_nothing(caplog: pytest.LogCaptureFixture):
    backend = Paced()
    backend.more = 1.0
    run = compiled(backend)
    proven(run)
    calls(run, 7, 30)
    assert backend.exact == [(7, 5)]
    assert "differs from eager" in caplog.text


def test_where_none_can_be_compiled_the_program_for_all_goes_on():
    backend = Paced()
    run = compiled(backend, fallback="error")
    proven(run)
    backend.error = CompileError("planted")
    for rows in (7, 8, 9):
        calls(run, rows, 10)
    assert backend.exact == [(7, 5), (8, 5)]


@pytest.mark.parametrize("settings", [{"specialize": False}, {"ranges": False}])
def test_options_that_say_otherwise(settings: dict[str, Any]):
    backend = Paced()
    run = compiled(backend, **settings)
    with record() as reports:
        proven(run)
        calls(run, 7, 10)
    assert backend.compiled == (1 if "specialize" in settings else 4)
    assert len(served(reports)) == 1


def test_under_run_nothing_is_compiled():
    backend = Paced()
    run = compiled(backend)
    proven(run)
    with dynamo_backends.run():
        calls(run, 7, 20)
    assert backend.exact == []


def test_weights_that_are_too_large_for_a_second_copy(monkeypatch: pytest.MonkeyPatch):
    weight = torch.randn(5, 40)
    backend = Paced()
    options = Options(cache=False, min_block_size=1)
    run = torch.compile(
        torch.nn.Linear(5, 40).requires_grad_(False),
        backend=lambda gm, args: compile_captured(backend, gm, args, options),
        dynamic=True,
    )
    monkeypatch.setattr(frequent, "BYTES", weight.nbytes - 1)
    with torch.no_grad():
        for rows in (3, 4, 6, *[7] * 20):
            run(torch.randn(rows, 5))
            assert background.wait(60)
    assert backend.exact == []


def planned(monkeypatch: pytest.MonkeyPatch) -> tuple[frequent.FrequentSizes, list[Any]]:
    """Sizes without a model, and what was asked for."""
    monkeypatch.undo()
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = 0  # a number, which varies
    graph.output((x,))
    asked: list[Any] = []
    module = fx.GraphModule(torch.nn.Module(), graph)
    given = Graph(module, "inference", (Input("x", Role.SYMBOL),))
    return frequent.FrequentSizes(given, 4, lambda key, _: not asked.append(key)), asked


class Program:
    """Serves a call."""

    served = Served("ranged", ())

    def __call__(self, args: list[Any]) -> list[Any]:
        return args


def sampled(sizes: frequent.FrequentSizes, number: int) -> None:
    """Calls until one was timed."""
    for _ in range(frequent.EVERY):
        sizes.choose(Program(), [number])


def test_an_executable_has_to_pay(monkeypatch: pytest.MonkeyPatch):
    sizes, asked = planned(monkeypatch)
    sizes._note((7,), 6.6 / frequent.EVERY)
    sampled(sizes, 7)
    assert asked == []
    sizes._note((7,), 0.1 / frequent.EVERY)
    sampled(sizes, 7)
    assert asked == [(7,)]
    sizes.add((7,), Program(), Program(), seconds=10.0)
    sizes._note((8,), 60.0 / frequent.EVERY)
    sampled(sizes, 8)
    assert asked == [(7,)], "the first one took ten seconds to compile"
    sizes._note((8,), 7.0 / frequent.EVERY)
    sampled(sizes, 8)
    assert asked == [(7,), (8,)]


def test_no_more_are_compiled_at_a_time_than_may_fail(monkeypatch: pytest.MonkeyPatch):
    sizes, asked = planned(monkeypatch)
    for number in range(4):
        sizes._note((number,), 100.0)
        sampled(sizes, number)
    assert asked == [(0,), (1,)]
    sizes.failed((0,))
    sampled(sizes, 2)
    assert asked == [(0,), (1,)], "one has failed, and one is open"
    sizes._decided((1,), has_won=True)
    sampled(sizes, 2)
    assert asked == [(0,), (1,), (2,)]

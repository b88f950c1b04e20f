"""`cudagraphs_eager`, and graphs around other backends, through torch.compile."""

import copy
import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends import (
    BackendUnavailableError,
    DeviceError,
    FallbackRefusedError,
    GraphReport,
    OptionError,
)
from dynamo_backends.conformance.weights.changes import net
from dynamo_backends.cudagraphs.backend import CudaGraphsEager, wrap_backend
from dynamo_backends.cudagraphs.options import CudaGraphOptions
from dynamo_backends.interface import registry
from dynamo_backends.runtime.prepared_executables import UnfrozenExecutable
from tests import refusals
from tests.backend_checks import SEMANTICS
from tests.checking import aliases, assert_same, copy_inputs, widen
from tests.cudagraphs.conftest import Machine

NAME = "cudagraphs_eager"


@pytest.fixture
def here(machine: Machine) -> Iterator[torch.device]:
    with torch.device(machine.device):
        yield machine.device


def compiled(fn: Any, backend: str = NAME, dynamic: bool | None = None, **options: Any) -> Any:
    compiler = dynamo_backends.compiler(backend, **options)
    return torch.compile(fn, backend=compiler, dynamic=dynamic)


def graphs(reports: list[GraphReport]) -> int:
    """How many graphs were recorded; every block had to be."""
    assert not any(r.runtime_fallbacks for r in reports), [r.runtime_fallbacks for r in reports]
    assert not any(r.uncaptured for r in reports), [r.uncaptured for r in reports]
    return sum(r.cuda_graphs for r in reports)


@pytest.mark.parametrize("kind", SEMANTICS)
def test_recorded_calls_are_eagers(kind: str, here: torch.device):
    fn, make_inputs = SEMANTICS[kind]
    inputs = make_inputs()
    function = compiled(fn)
    with dynamo_backends.record() as reports:
        for _ in range(5):
            ours, theirs, precise = (copy_inputs(inputs) for _ in range(3))
            results, expected = function(*ours), fn(*theirs)
            assert_same(expected, results, widen(fn)(*(widen(x) for x in precise)))
            assert_same(theirs, ours, theirs)
            assert aliases(results, ours) == aliases(expected, theirs)
    assert graphs(reports) >= 1
    assert all(not r.fallbacks for r in reports)


def test_weights_are_never_stale(here: torch.device):
    module, x = net(), torch.randn(2, 4, 4, 4)
    function = compiled(module)

    def agrees() -> None:
        with torch.no_grad():
            for _ in range(4):
                assert_same(module(x), function(x), copy.deepcopy(module).double()(x.double()))

    with dynamo_backends.record() as reports:
        agrees()
        assert graphs(reports) == 1
        with torch.no_grad():
            module[0].weight.mul_(2)
        module[3].bias.data.add_(1)
        torch.optim.SGD(module.parameters(), lr=0.1)
        agrees()
        assert graphs(reports) == 1, "weights are read where they are"
        module[0].weight = nn.Parameter(module[0].weight.detach() * 3)
        agrees()
        assert graphs(reports) == 2
        module.load_state_dict(net().state_dict())
        agrees()
    assert graphs(reports) == 2


def test_one_graph_for_each_shape_and_a_limit_of_them(here: torch.device, machine: Machine):
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)).eval()
    function = compiled(module, dynamic=True, max_executables=2)
    with dynamo_backends.record() as reports, torch.no_grad():
        for batch in (2, 3, 2, 3, 5, 2):
            for _ in range(4):
                x = torch.randn(batch, 8)
                torch.testing.assert_close(function(x), module(x))
    assert graphs(reports) == 4, "2, 3, 5 and once more 2, which 5 had displaced"
    if machine.double is not None:
        import gc
        import weakref

        gone = [weakref.ref(g) for g in machine.double.graphs]
        machine.double.graphs.clear()
        for g in gone:
            graph = g()
            if graph is not None and graph.pool is not None:
                graph.pool.graphs.clear()
            del graph
        gc.collect()
        assert sum(g() is not None for g in gone) == 2


def test_training(here: torch.device):
    module = nn.Sequential(
        nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.3), nn.Linear(8, 2)
    )
    function = compiled(module)

    def gradients(model: Any, owner: nn.Module, x: Tensor) -> list[Tensor]:
        owner.zero_grad()
        torch.manual_seed(4)
        model(x).square().sum().backward()
        return [p.grad.clone() for p in owner.parameters()]

    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with dynamo_backends.record() as reports:
        for _ in range(6):
            x = torch.randn(3, 6)
            expected = gradients(module, module, x)
            ours = gradients(function, module, x)
            for e, r in zip(expected, ours, strict=True):
                torch.testing.assert_close(r, e, rtol=1e-5, atol=1e-6)
            optimizer.step()
    assert {r.kind for r in reports} == {"forward", "backward"}
    assert graphs(reports) >= 2


def test_two_forward_passes_before_their_backward_passes(here: torch.device):
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    function = compiled(module, cudagraph_outputs="reused")
    for _ in range(5):
        x, y = torch.randn(3, 4), torch.randn(3, 4)
        module.zero_grad()
        first, second = function(x).sum(), function(y).sum()
        (second * 2).backward()
        first.backward()
        ours = [p.grad.clone() for p in module.parameters()]
        module.zero_grad()
        (module(x).sum() + 2 * module(y).sum()).backward()
        for p, r in zip(module.parameters(), ours, strict=True):
            torch.testing.assert_close(r, p.grad)


def test_reused_results_are_those_of_the_last_call(here: torch.device):
    function = compiled(lambda x: (x * 2).relu() + 1, cudagraph_outputs="reused")
    for i in range(5):
        x = torch.full((4,), float(i))
        result = function(x)
        assert torch.equal(result, x * 2 + 1)
    again = function(torch.zeros(4))
    assert torch.equal(result, again)


def test_what_waits_for_the_device_stays_in_eager(here: torch.device):
    def fn(x: Tensor) -> Tensor:
        y = (x * 2).relu() + x.exp()
        y = y - y.sum()
        mask = y.abs() > 1e9
        y = y.clone().index_put_((mask,), torch.zeros(()), accumulate=True)
        return (y * 3).sigmoid().cos()

    function = compiled(fn, min_block_size=1, fragmented="keep")
    with dynamo_backends.record() as reports:
        for _ in range(4):
            x = torch.randn(3, 3)
            torch.testing.assert_close(function(x), fn(x))
    reasons = {f.reason for r in reports for f in r.fallbacks}
    assert reasons == {"the host waits for the number of elements that its mask selects"}
    assert graphs(reports) == 2, "one before it and one after it"


@dataclass(frozen=True)
class PlantedOptions(CudaGraphOptions):
    """A backend's one line for having graphs is its base class."""


class Planted(CudaGraphsEager):
    """A backend of a vendor: some of its programs wait for the device."""

    name = "planted"
    Options = PlantedOptions
    waits = False  # set by tests

    def compile(self, graph: Any, options: Any) -> Any:
        inner = UnfrozenExecutable(graph, graph.module)
        bind = inner.bind

        def waiting(weights: Any) -> Any:
            run, copied = bind(weights)
            if not self.waits:
                return run, copied
            return lambda inputs: inputs[0].sum().item() is None or run(inputs), copied

        inner.bind = waiting  # type: ignore[method-assign]
        return inner


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> type[Planted]:
    monkeypatch.setitem(registry._registered, "planted", Planted)
    registry.get_backend.cache_clear()
    yield Planted
    registry.get_backend.cache_clear()


def square(x: Tensor) -> Tensor:
    return (x * x + 1).sqrt() * 2


@pytest.mark.parametrize(("asked", "expected"), [(False, 0), (True, 1)])
def test_any_backend_gets_graphs_by_its_options(
    here: torch.device, planted: Any, asked: bool, expected: int
):
    function = compiled(square, "planted", cudagraphs=asked)
    with dynamo_backends.record() as reports:
        for _ in range(4):
            x = torch.randn(5)
            torch.testing.assert_close(function(x), square(x))
    assert graphs(reports) == expected


def test_a_program_that_cannot_be_recorded_runs_as_it_is_and_is_reported(
    here: torch.device, planted: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
):
    monkeypatch.setattr(Planted, "waits", True)
    function = compiled(square, "planted", cudagraphs=True)
    with dynamo_backends.record() as reports, caplog.at_level(logging.WARNING, "dynamo_backends"):
        for _ in range(5):
            x = torch.randn(5)
            torch.testing.assert_close(function(x), square(x))
    (report,) = reports
    assert report.cuda_graphs == 0
    assert len(report.uncaptured) == 1
    assert report.runtime_fallbacks == []
    assert report.to_dict()["uncaptured"] == report.uncaptured
    (said,) = [r.message for r in caplog.records if "CUDA graph" in r.message]
    assert said.startswith("planted: a block runs without a CUDA graph: ")


def test_a_refused_fallback_is_an_error(
    here: torch.device, planted: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Planted, "waits", True)
    function = compiled(square, "planted", cudagraphs=True, fallback="error")
    function(torch.randn(5))
    function(torch.randn(5))
    for _ in range(2):
        with pytest.raises(FallbackRefusedError, match="cannot be recorded as a CUDA graph"):
            function(torch.randn(5))


def test_another_backend_as_a_backend_of_graphs(
    here: torch.device, planted: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(
        registry._registered, "planted_graphs", lambda: wrap_backend("planted_graphs", "planted")
    )
    function = compiled(square, "planted_graphs")
    with dynamo_backends.record() as reports:
        for _ in range(4):
            x = torch.randn(5)
            torch.testing.assert_close(function(x), square(x))
    assert graphs(reports) == 1
    options = registry.get_backend("planted_graphs").Options
    assert options.parse({"cudagraphs": False}, "planted_graphs").cudagraphs is False
    assert options().cudagraphs is True


def test_a_backend_without_the_options_can_be_wrapped_too(here: torch.device):
    backend = wrap_backend("ts_trace_graphs", "ts_trace")
    options = backend.Options.parse({}, "ts_trace_graphs")
    assert (options.cudagraphs, options.cudagraph_warmup, options.freezing) == (True, 2, "probe")
    assert backend.summary == "ts_trace, launched as CUDA graphs"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"cudagraph_warmup": 0},
            "option 'cudagraph_warmup' of cudagraphs_eager must be at least 1",
        ),
        ({"cudagraph_outputs": "old"}, "must be one of 'fresh', 'reused', not 'old'"),
        ({"cudagraph": True}, "Did you mean 'cudagraphs'"),
    ],
)
def test_wrong_options(options: dict[str, Any], text: str):
    with pytest.raises(OptionError, match=text):
        dynamo_backends.compiler(NAME, **options)


def test_tensors_elsewhere_are_refused(monkeypatch: pytest.MonkeyPatch):
    """As CUDA would say it: the real driver, made to look usable."""
    from dynamo_backends.cudagraphs.device import Cuda

    monkeypatch.setattr(Cuda, "why_not", lambda self: None)
    with pytest.raises(Exception, match="cudagraphs_eager uses CUDA graphs") as info:
        compiled(square)(torch.ones(3))
    error = refusals.cause(info)
    assert isinstance(error, DeviceError)
    assert "the graph has no tensors on a cuda device (its inputs are on cpu)" in str(error)
    assert "Move the model and its inputs to a cuda device." in str(error)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_cuda():
    with pytest.raises(Exception, match="cannot run here") as info:
        compiled(square)(torch.ones(3))
    error = refusals.cause(info)
    assert isinstance(error, BackendUnavailableError)
    assert "pip install torch --index-url" in str(error)


def test_explain_says_what_runs_without_a_graph(here: torch.device, planted: Any):
    compiler = dynamo_backends.compiler("planted", cudagraphs=True)
    explained = dynamo_backends.explain(square, torch.ones(3), backend=compiler)
    assert "CUDA graph" not in str(explained)
    (graph,) = explained.graphs
    report = dataclasses.replace(graph.reports[0], uncaptured=["it waits for the device"])
    graph = dataclasses.replace(graph, reports=(report,))
    shown = str(dataclasses.replace(explained, graphs=(graph,)))
    assert "runs without a CUDA graph: it waits for the device" in shown

"""Graphs that are differentiated: chosen for whole, and forward and backward apart."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends import GraphReport
from dynamo_backends.autotune.backend import Autotune, ForwardBackwardAutotune
from dynamo_backends.autotune.options import AutotuneOptions
from dynamo_backends.pipeline.captured import compile_captured
from dynamo_backends.workers.progress import Counts
from tests.autotune.planted import Slow
from tests.checking import assert_same


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.GELU(), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2)
    )


def step(model: Any, owner: nn.Module, x: Tensor) -> list[Tensor]:
    """Results, gradients and buffers of a training step from seeded random numbers."""
    owner.zero_grad()
    torch.manual_seed(7)
    result = model(x)
    result.square().sum().backward()
    gradients = [p.grad.clone() for p in owner.parameters() if p.grad is not None]
    return [result.detach(), *gradients, *(b.clone() for b in owner.buffers())]


def agrees(backend: Any, calls: int = 2) -> list[GraphReport]:
    """Some steps of the net, compared with eager's."""
    ours, theirs, precise = net(), net(), net().double()
    compiled = torch.compile(ours, backend=backend)
    with dynamo_backends.record() as reports:
        for i in range(calls):
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(i))
            found, expected = step(compiled, ours, x), step(theirs, theirs, x)
            assert_same(expected, found, step(precise, precise, x.double()))
    return reports


@pytest.mark.usefixtures("plant")
def test_who_gives_gradients_of_other_strides_takes_part():
    model, x = Slow(), torch.randn(40, 50)
    options = {"candidates": ("other_gradients",), "isolate": "off"}
    with dynamo_backends.record() as reports:
        first, second = torch.compile(model, backend="autotune", options=options)(x)
        (first.sum() + second.sum()).backward()
    assert reports[0].chosen == "other_gradients"
    assert model.w.grad is not None
    assert model.w.grad.stride() == model.w.stride()
    torch.testing.assert_close(model.w.grad, torch.ones(40, 50))


def test_no_grad_is_written_and_no_state_changed_while_tuning(counts: Counts):
    model = net()
    twin = copy.deepcopy(model)
    x = torch.randn(5, 6)
    compiler = dynamo_backends.compiler("autotune", candidates=("ts_trace",))
    result = torch.compile(model, backend=compiler)(x)
    assert counts.sessions >= 1
    assert all(p.grad is None for p in model.parameters())
    twin(x)
    for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert result.requires_grad


@pytest.mark.usefixtures("eager_seems_slow")
def test_forward_and_backward_are_chosen_for_apart(counts: Counts):
    compiler = dynamo_backends.compiler("autotune", candidates=("ts_trace", "openxla"))
    reports = agrees(compiler)
    assert [r.kind for r in reports] == ["forward", "backward"]
    for report in reports:
        assert report.chosen in ("ts_trace", "openxla")
        names = {row.name for row in report.candidates if not row.graph}
        assert names == {"eager", "ts_trace", "openxla"}
        assert not report.runtime_fallbacks
    whole = [row for row in reports[0].candidates if row.graph == "training"]
    assert {row.name: row.chosen for row in whole} == {"split": True, "eager": False}
    assert counts.sessions == 3


@pytest.mark.usefixtures("eager_seems_slow")
def test_the_decisions_are_found_again(counts: Counts):
    compiler = dynamo_backends.compiler("autotune", candidates=("ts_trace",))
    agrees(compiler)
    sessions, samples = counts.sessions, counts.samples
    torch._dynamo.reset()
    reports = agrees(compiler)
    assert (counts.sessions, counts.samples) == (sessions, samples)
    assert counts.remembered == 3
    assert [r.chosen for r in reports] == ["ts_trace", "ts_trace"]


def test_the_real_choice_is_right_too():
    reports = agrees(dynamo_backends.compiler("autotune", candidates=("ts_trace",)))
    assert reports
    assert reports[0].candidates[0].graph == "training"


@pytest.mark.usefixtures("eager_seems_slow")
def test_with_symbols_one_decision_serves_all_sizes(counts: Counts):
    ours, theirs, precise = net(), net(), net().double()
    compiler = dynamo_backends.compiler("autotune", candidates=("ts_trace", "inductor"))
    with dynamo_backends.record() as reports:
        compiled = torch.compile(ours, backend=compiler)
        for size in (5, 7, 9, 12, 31):
            x = torch.randn(size, 6, generator=torch.Generator().manual_seed(size))
            found, expected = step(compiled, ours, x), step(theirs, theirs, x)
            assert_same(expected, found, step(precise, precise, x.double()))
            if size == 7:  # Dynamo's second graph has a symbol
                made = dataclasses.replace(counts)
    assert counts.sessions == made.sessions, "of the first graph, its two parts, and the second"
    assert (counts.compiled, counts.samples) == (made.compiled, made.samples)
    assert {row.name for row in reports[-1].candidates} <= {"eager", "ts_trace", "inductor"}


@pytest.mark.usefixtures("plant")
def test_gradients_are_compared_too():
    model, x = Slow(), torch.randn(40, 50)
    compiler = dynamo_backends.compiler("autotune", candidates=("detaches", "good"), isolate="off")
    with dynamo_backends.record() as reports:
        compiled = torch.compile(model, backend=compiler)
        results = compiled(x)
        sum(r.sum() for r in results).backward()
    (report,) = reports
    gradient = model.w.grad.clone()
    model.zero_grad()
    sum(r.sum() for r in model(x)).backward()
    torch.testing.assert_close(gradient, model.w.grad)
    rows = {row.name: row.reason for row in report.candidates}
    assert rows["detaches"] == "wrong: 2 outputs and gradients instead of 3"
    assert report.chosen == "good"


def test_the_pipeline_alone_splits():
    def backend(gm: Any, inputs: Any) -> Any:
        return compile_captured(
            ForwardBackwardAutotune(), gm, inputs, AutotuneOptions(candidates=("ts_trace",))
        )

    reports = agrees(backend, calls=1)
    assert [r.kind for r in reports] == ["forward", "backward"]
    assert all(r.chosen in ("eager", "ts_trace") for r in reports)


def test_a_functional_graph_that_fails_later_is_replaced(
    counts: Counts, monkeypatch: pytest.MonkeyPatch
):
    from dynamo_backends.autotune.executables import TunedGraph

    made: list[TunedGraph] = []
    monkeypatch.setattr(
        Autotune, "compile", lambda _, g, o: made.append(TunedGraph(g, o)) or made[-1]
    )

    def backend(gm: Any, inputs: Any) -> Any:
        return compile_captured(
            ForwardBackwardAutotune(), gm, inputs, AutotuneOptions(candidates=("ts_trace",))
        )

    model = net().eval()
    compiled = torch.compile(model, backend=backend)
    x = torch.randn(5, 6)
    with torch.no_grad():
        compiled(x)
        (graph,) = made
        graph._winner = lambda _: 1 / 0  # type: ignore[assignment,return-value]
        for _ in range(2):
            torch.testing.assert_close(compiled(x), model(x))
    assert counts.replaced == 1

"""Compiled graphs have names in the traces of torch's profilers."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

import dynamo_backends
from dynamo_backends.autotune.executables import WinnerCallable
from dynamo_backends.interface.report import GraphReport
from dynamo_backends.runtime.program import graph_name, part_names, record_if_profiled

CALL = "a call"
GRAPH = re.compile(r"(\S+ \w+ graph)(?: \d+)?(?: (block|eager) (\d+))?")


def seconds_by_name(call: Callable[[], Any], calls: int = 5) -> dict[str, float]:
    """Time under each name, after a call that compiles."""
    call()
    call()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(calls):
            with record_function(CALL):
                call()
    return {e.key: e.cpu_time_total for e in profiler.key_averages()}


def model(width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))


@pytest.mark.parametrize("backend", ["openxla", "onnxrt"])
def test_backend_graph_and_block_have_names_for_nine_tenths_of_a_call(backend: str):
    # A call takes tens of ms, and what is around its block some 100 µs, on a busy machine more.
    compiled, x = torch.compile(model(1024).eval(), backend=backend), torch.randn(512, 1024)
    with torch.no_grad(), dynamo_backends.record() as reports:
        times = seconds_by_name(lambda: compiled(x))
    (report,) = reports
    name = f"{backend} inference graph {report.capture} block 1"
    assert times[name] >= 0.9 * times[CALL], times


def test_parts_in_eager_have_names_too():
    @torch.compile(
        backend="openxla", options={"keep_in_eager": ("aten.tanh",), "min_block_size": 1}
    )
    def fn(x: Tensor) -> Tensor:
        return (x.sin() @ x).tanh().cos() @ x

    x = torch.randn(256, 256)
    names = {m[2] + m[3] for m in map(GRAPH.fullmatch, seconds_by_name(lambda: fn(x))) if m}
    assert names == {"block1", "eager2", "block3"}


def test_forward_and_backward_are_told_apart():
    trained, x = model(), torch.randn(4, 64)
    compiled = torch.compile(trained, backend="openxla")
    names = seconds_by_name(lambda: compiled(x).sum().backward())
    kinds = [m[1] for m in map(GRAPH.fullmatch, names) if m]
    assert sorted(kinds) == ["openxla backward graph", "openxla forward graph"]


def test_a_whole_step_has_a_name():
    trained, x = model(), torch.randn(4, 64)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)

    def train(x: Tensor) -> Tensor:
        loss = trained(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = dynamo_backends.compile_step(train, model=trained, optimizer=optimizer)
    times = seconds_by_name(lambda: step(x))
    assert "openxla step graph" in times


def test_what_autotune_chose_has_the_name_of_the_winners_graph():
    report = GraphReport("inductor", "inference", capture=2)
    chosen = WinnerCallable("inductor", lambda x: [x + 1], lambda x: [x + 1], (), [report], None)
    assert "inductor inference graph 2" in seconds_by_name(lambda: chosen(torch.ones(3)))


def test_names_say_who_runs_what():
    report = GraphReport("openxla", "inference", capture=3)
    assert graph_name(report) == "openxla inference graph 3"
    assert graph_name(report, "inductor") == "inductor inference graph 3"
    assert graph_name(GraphReport("onnxrt", "step")) == "onnxrt step graph"
    assert part_names("g", [True, False]) == ["g block 1", "g eager 2"]


def test_nothing_is_recorded_where_no_profiler_listens():
    assert record_if_profiled("x") is record_if_profiled("y"), "nothing is made"
    with profile(activities=[ProfilerActivity.CPU]):
        assert isinstance(record_if_profiled("x"), record_function)

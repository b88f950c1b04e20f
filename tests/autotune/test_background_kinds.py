"""`mode="background"` for graphs that draw, under autocast, and that are differentiated."""

import copy
import logging
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dynamo_backends
from dynamo_backends import GraphReport, TuningStatus
from dynamo_backends.workers.progress import Counts
from tests.autotune.conftest import LONG_S
from tests.autotune.planted import Slow
from tests.checking import assert_same

pytestmark = pytest.mark.usefixtures("tuning")


def compiled(fn: Callable[..., Any], *names: str, **options: Any) -> Callable[..., Any]:
    options = {"mode": "background", "candidates": names, **options}
    return torch.compile(fn, backend="autotune", options=options)


def only_status() -> TuningStatus:
    assert dynamo_backends.wait_for_tuning(LONG_S)
    (status,) = dynamo_backends.tuning_status()
    return status


def decided_before(fn: Callable[..., Any], call: Callable[[Any], object], *names: str) -> None:
    """Has a decision made, and forgets all else."""
    options = {"candidates": names, "isolate": "off"}
    call(torch.compile(fn, backend="autotune", options=options))
    torch._dynamo.reset()


# Graphs that draw.


def drawing(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5) + torch.rand_like(x) + torch.randn(3)


def is_eagers(run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """The results are eager's, and so is what is drawn next."""
    with torch.no_grad():
        torch.manual_seed(5)
        expected, next_one = drawing(x), torch.rand(1)
        torch.manual_seed(5)
        torch.testing.assert_close(run(x), expected)
        assert torch.equal(torch.rand(1), next_one)


@pytest.mark.usefixtures("eager_seems_slow")
def test_a_winner_that_draws_is_proven_with_numbers_of_its_own(counts: Counts):
    x = torch.randn(20, 3)
    decided_before(drawing, lambda run: is_eagers(run, x), "ts_trace")
    run = compiled(drawing, "ts_trace")
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with torch.no_grad():
        run(x)
        torch.set_rng_state(before)
        verified = counts.verified
        assert only_status().winner == "ts_trace"
    assert counts.verified == verified + 1
    assert torch.equal(torch.get_rng_state(), before), "nothing draws from the user's generator"
    is_eagers(run, x)


@pytest.mark.parametrize("name", ["ts_trace", pytest.param("inductor", marks=pytest.mark.long)])
def test_graphs_that_draw_are_tuned(name: str):
    x = torch.randn(20, 3)
    with dynamo_backends.record() as reports:
        run = compiled(drawing, name)
        is_eagers(run, x)
        assert only_status().state == "serving"
        is_eagers(run, x)
    rows = {row.name: row for row in reports[0].candidates}
    assert rows[name].seconds is not None, rows[name].reason


# Under autocast.


@pytest.mark.usefixtures("eager_seems_slow")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_a_part_of_what_is_loaded(dtype: torch.dtype, counts: Counts):
    model, x = nn.Sequential(nn.Linear(30, 40), nn.ReLU()).eval(), torch.randn(20, 30)

    @torch.no_grad()
    def call(run: Callable[[Tensor], Tensor]) -> None:
        with torch.autocast("cpu", dtype):
            result = run(x)
            assert result.dtype == dtype
            torch.testing.assert_close(result, model(x), atol=0.05, rtol=0.05)

    decided_before(model, call, "ts_trace")
    run = compiled(model, "ts_trace")
    call(run)
    assert only_status().winner == "ts_trace"
    assert counts.sessions == 1
    call(run)


@torch.no_grad()
def test_graphs_under_autocast_are_tuned_under_it():
    model, x = nn.Sequential(nn.Linear(30, 40), nn.ReLU()).eval(), torch.randn(20, 30)
    with dynamo_backends.record() as reports, torch.autocast("cpu"):
        run = compiled(model, "ts_trace")
        run(x)
        assert only_status().state == "serving"
        torch.testing.assert_close(run(x), model(x), atol=0.05, rtol=0.05)
    rows = {row.name: row for row in reports[0].candidates}
    assert rows["ts_trace"].seconds is not None, rows["ts_trace"].reason
    assert 1e-4 < rows["ts_trace"].error < 0.05, "it computes in bfloat16, as eager does"


# Graphs that are differentiated.


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.GELU(), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2)
    )


def train(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    """A step's results, gradients and buffers."""
    model.zero_grad()
    torch.manual_seed(7)
    result = run(x)
    result.square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.01 * p.grad  # type: ignore[operator]
    return [result.detach(), *gradients, *(b.clone() for b in model.buffers())]


def trains_as_in_eager(
    ours: nn.Module, between: Callable[[], None], *names: str, **options: Any
) -> list[GraphReport]:
    theirs, precise = copy.deepcopy(ours), copy.deepcopy(ours).double()
    with dynamo_backends.record() as reports:
        run = compiled(ours, *names, **options)
        for i in range(6):
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(i))
            expected = train(theirs, theirs, x), train(precise, precise, x.double())
            assert_same(expected[0], train(run, ours, x), expected[1])
            if i == 2:
                between()
    return reports


@pytest.mark.usefixtures("eager_seems_slow")
def test_forward_and_backward_take_over_together(counts: Counts):
    decided_before(net(), lambda run: run(torch.randn(5, 6)).sum().backward(), "ts_trace")
    sessions, compiled_before = counts.sessions, counts.compiled

    def settled() -> None:
        assert only_status().winner == "split"

    reports = trains_as_in_eager(net(), settled, "ts_trace")
    assert [(r.kind, r.chosen) for r in reports] == [
        ("forward", "ts_trace"),
        ("backward", "ts_trace"),
    ]
    assert (counts.sessions, counts.compiled) == (sessions, compiled_before + 3)
    assert not any(report.events for report in reports)
    whole = {row.name: row.chosen for row in reports[0].candidates if row.graph == "training"}
    assert whole == {"split": True, "eager": False}


def test_graphs_that_are_differentiated_are_tuned(counts: Counts):
    def settled() -> None:
        assert only_status().state == "serving"

    reports = trains_as_in_eager(net(), settled, "ts_trace")
    rows = {row.name: row for row in reports[0].candidates if row.graph == "training"}
    assert rows["split"].seconds is not None, rows["split"].reason
    assert counts.sessions == 0, "no session in this process"


class Adding(nn.Module):
    """Much to do in eager, and one addition for a compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(40, 50))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(300):
            x = x + 0.1
        return x * self.w


@pytest.mark.long
def test_what_was_chosen_for_forward_and_backward_is_found_again(
    counts: Counts, caplog: pytest.LogCaptureFixture
):
    model, x = Adding(), torch.randn(40, 50)
    with dynamo_backends.record() as reports, caplog.at_level(logging.INFO, "dynamo_backends"):
        run = compiled(model, "openxla")
        run(x).sum().backward()
        assert only_status().winner == "split"
    assert reports[0].chosen == "openxla"
    assert [report.kind for report in reports] == ["forward", "backward"]
    assert "there is no decision for" not in caplog.text
    assert counts.sessions == 0
    (expected,) = torch.autograd.grad(model(x).sum(), model.w)
    (found,) = torch.autograd.grad(run(x).sum(), model.w)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_winner_of_another_package_is_differentiated(plant: ModuleType):
    model, x = Slow(), torch.randn(40, 50)

    def gradient(run: Callable[..., Any]) -> Tensor:
        (found,) = torch.autograd.grad(sum(r.sum() for r in run(x)), model.w)
        return found

    run = compiled(model, "detaches", "good")
    torch.testing.assert_close(gradient(run), gradient(model))
    kept = sum(r.sum() for r in run(x))
    assert only_status().winner == "good"
    torch.testing.assert_close(gradient(run), gradient(model))
    (found,) = torch.autograd.grad(kept, model.w)  # begun in eager, and ended there
    torch.testing.assert_close(found, gradient(model))
    assert model.w.grad is None


@pytest.mark.long
def test_threads_train_while_the_winner_takes_over(plant: ModuleType):
    model, over, wrong = Slow(), threading.Event(), []
    run = compiled(model, "good")
    run(torch.randn(40, 50, requires_grad=True))

    def call(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        while not over.is_set():
            x = torch.randn(40, 50, generator=generator, requires_grad=True)
            found, expected = (
                torch.autograd.grad(sum(r.square().sum() for r in fn(x)), (x, model.w))
                for fn in (run, model)
            )
            wrong.extend(
                1 for a, b in zip(found, expected, strict=True) if not torch.allclose(a, b)
            )
            time.sleep(0.05)  # eight threads leave little to a process of lower priority

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    status = only_status()
    time.sleep(0.2)
    over.set()
    for thread in threads:
        thread.join()
    assert status.winner == "good"
    assert wrong == []

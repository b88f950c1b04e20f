"""`mode="background"` in training with sizes that change: as for other graphs with symbols."""

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends import TuningStatus
from dynamo_backends.autotune import symbolic_sizes, tuning_thread
from dynamo_backends.autotune.session import SessionOutcome
from dynamo_backends.autotune.tuning_thread import TuningJob
from dynamo_backends.interface.report import CandidateReport
from dynamo_backends.pipeline import background
from dynamo_backends.workers.progress import Counts
from tests.autotune.conftest import LONG_S
from tests.autotune.planted import Slow
from tests.autotune.test_background_kinds import net, train
from tests.checking import assert_same

pytestmark = pytest.mark.usefixtures("tuning")


def compiled(fn: Callable[..., Any], *names: str) -> Callable[..., Any]:
    options = {"mode": "background", "candidates": names}
    return torch.compile(fn, backend="autotune", options=options)


def batch(*shape: int, seed: int = 0) -> Tensor:
    """A batch whose size is a symbol from the first call on."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    torch._dynamo.maybe_mark_dynamic(x, 0)
    return x


def last_status() -> TuningStatus:
    assert dynamo_backends.wait_for_tuning(LONG_S)
    return dynamo_backends.tuning_status()[-1]


def test_it_is_tuned_over_the_sizes_that_occur(
    plant: ModuleType, counts: Counts, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(symbolic_sizes, "MAX_SIZES", 3)
    monkeypatch.setattr(symbolic_sizes, "WAIT_S", LONG_S)
    model = Slow()

    def gradient(run: Callable[..., Any], size: int) -> Tensor:
        results = run(batch(size, 40, 50))
        (found,) = torch.autograd.grad(sum(r.square().sum() for r in results), model.w)
        return found

    with dynamo_backends.record() as reports:
        run = compiled(model, "good", "detaches", "ts_trace")
        for size in (5, 6, 6, 7):
            torch.testing.assert_close(gradient(run, size), gradient(model, size))
        status = last_status()
        assert status.winner == "good", status
        assert status.sizes.endswith(" = 5 in 1 call, 6 in 2 calls, 7 in 1 call")
        for size in (5, 9, 31):
            torch.testing.assert_close(gradient(run, size), gradient(model, size))
    rows = {row.name: row for row in reports[0].candidates}
    assert set(rows) == {"eager", "good", "detaches", "ts_trace"}
    assert rows["detaches"].reason.startswith("wrong")
    assert rows["ts_trace"].race_s is not None, rows["ts_trace"].reason
    assert counts.sessions == 0, "no session in this process"


def without_another_process(winner: str, monkeypatch: pytest.MonkeyPatch) -> list[TuningJob]:
    """Has a candidate win; the tasks for which it did."""
    tasks: list[TuningJob] = []

    def add(task: TuningJob) -> None:
        tasks.append(task)
        rows = CandidateReport("eager", "slower", 0.0, 0.0), CandidateReport(winner, "", 0.1, 0.0)
        task.decided(task.owner(), SessionOutcome(winner, rows))

    monkeypatch.setattr(tuning_thread, "enqueue_job", add)
    return tasks


@pytest.mark.parametrize(
    "name",
    [
        "ts_trace",
        pytest.param("openxla", marks=pytest.mark.long),
        pytest.param("inductor", marks=pytest.mark.long),
    ],
)
def test_other_sizes_are_as_in_eager_and_the_decision_is_kept(
    name: str, monkeypatch: pytest.MonkeyPatch, counts: Counts
):
    tasks = without_another_process(name, monkeypatch)

    def trains_as_in_eager(ours: nn.Module) -> None:
        theirs, precise = copy.deepcopy(ours), copy.deepcopy(ours).double()
        run = compiled(ours, name)
        for i, size in enumerate((5, 5, 7, 5, 9, 7, 9)):
            x = batch(size, 6, seed=i)
            expected = train(theirs, theirs, x), train(precise, precise, x.double())
            assert_same(expected[0], train(run, ours, x), expected[1])
            assert last_status().winner == name, last_status()
            assert background.wait_until_idle(LONG_S)

    with dynamo_backends.record() as reports:
        trains_as_in_eager(net())
    kinds = ["forward"] if name == "inductor" else ["forward", "backward"]
    assert [(r.kind, r.chosen) for r in reports] == [(kind, name) for kind in kinds]
    assert not any(report.events for report in reports)
    if name != "inductor":
        for report in reports:
            eager = sum(x.calls for x in report.traffic() if x.by == "eager while compiling")
            assert sum(x.calls for x in report.traffic()) - eager >= 3 >= eager
    torch._dynamo.reset()
    trains_as_in_eager(net())
    assert (len(tasks), counts.sessions, counts.remembered) == (1, 0, 1)

"""Candidates that are wrong, or fail, are never used; the program goes on; a reason is given."""

import dataclasses
import logging
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import dynamo_backends
from dynamo_backends import GraphReport
from dynamo_backends.autotune.candidates import Candidate
from dynamo_backends.autotune.decisions import DecisionStore
from dynamo_backends.autotune.executables import WinnerCallable
from dynamo_backends.autotune.options import AutotuneOptions
from dynamo_backends.autotune.worker import try_candidate
from dynamo_backends.interface.report import EagerEvent
from dynamo_backends.workers.progress import Counts
from tests.autotune.planted import Slow, slow

REASONS = {
    "wrong_numbers": "wrong: output 0 differs from eager by up to",
    "not_a_number": "wrong: output 0 has NaN where eager has not, or the reverse",
    "wrong_dtype": "wrong: output 0 is float64[40, 50] instead of float32[40, 50]",
    "wrong_alias": "wrong: its outputs share memory with other tensors than eager's do",
    "wrong_strides": "wrong: output 0 has strides (1, 40) instead of (50, 1)",
    "mutates": "wrong: it writes to input",
    "writes_weight": "wrong: it writes to input",
    "reuses_memory": "wrong: its results overwrite those of the previous call",
    "baked_in": "(on perturbed inputs)",
    "raises_at_compile": "could not be compiled: NotImplementedError: no such chip",
    "raises_at_third_call": "raised when it was called: MemoryError: the third call",
}


def tune(model: torch.nn.Module, x: torch.Tensor, **options: Any) -> tuple[Any, GraphReport]:
    """Compiles and calls a model; its results are compared with eager's."""
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad(), dynamo_backends.record() as reports:
        compiled = torch.compile(model, backend="autotune", options=options)
        for inputs in (x, x + 1):
            given = inputs.clone()
            results, expected = compiled(inputs), model(inputs)
            torch.testing.assert_close(results, expected)
            assert torch.equal(inputs, given)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    (report,) = reports
    return compiled, report


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(40, 50)


@pytest.mark.usefixtures("plant")
def test_the_fast_one_that_is_right_wins(x: torch.Tensor):
    _, report = tune(Slow(), x, candidates=["good"], isolate="off")
    assert report.chosen == report.backend == "good"
    rows = {row.name: row for row in report.candidates}
    assert rows["good"].chosen
    assert rows["good"].speedup is not None
    assert rows["good"].speedup[1] > 1
    assert "times as long as good" in rows["eager"].reason


@pytest.mark.usefixtures("plant")
def test_memory_of_losers_is_given_back(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch):
    class Kept:
        """In a cycle, as graphs are."""

        def __init__(self, compiled: Any) -> None:
            self.compiled, self.itself = compiled, self

        def __call__(self, *args: Any) -> Any:
            return self.compiled(*args)

    made: dict[str, weakref.ref[Kept]] = {}
    compile_it, freed = Candidate.compile, []

    def compiled(self: Candidate, *args: Any) -> Kept:
        kept = Kept(compile_it(self, *args))
        made[self.name] = weakref.ref(kept)
        return kept

    def note() -> None:
        freed.append({name: kept() is None for name, kept in made.items()})

    monkeypatch.setattr(Candidate, "compile", compiled)
    monkeypatch.setattr("dynamo_backends.autotune.executables.return_free_memory", note)
    options = {"candidates": ["good", "wrong_numbers"], "isolate": "off"}
    tune(Slow(), x, **options)
    assert freed == [{"good": False, "wrong_numbers": True}]
    torch._dynamo.reset()
    tune(Slow(), x, **options)
    assert len(freed) == 1, "an earlier decision compiles no losers"


@pytest.mark.usefixtures("plant")
def test_explain_shows_where_the_seconds_went(x: torch.Tensor):
    options = {"candidates": ["good", "wrong_numbers"], "isolate": "off"}
    with torch.no_grad():
        measured, remembered = (
            dynamo_backends.explain(Slow(), x, backend="autotune", options=options)
            for _ in range(2)
        )
    (report,), (again,) = measured.reports, remembered.reports
    rows = {row.name: row for row in report.candidates}
    seconds = [s for r in rows.values() for s in (r.compile_s, r.verify_s, r.race_s)]
    assert all(s >= 0 for s in seconds if s is not None)
    assert rows["good"].race_s
    assert rows["wrong_numbers"].verify_s
    assert rows["wrong_numbers"].race_s is None
    assert again.tuning_seconds == report.tuning_seconds, "kept with the decision"
    assert again.candidates == report.candidates
    spent = {**report.tuning_seconds, "race": sum(r.race_s or 0.0 for r in rows.values())}
    assert list(spent) == ["capture", "reference", "race"]
    for text in (str(measured), str(remembered)):
        assert all(f"{name} {s:.2f} s" in text for name, s in spent.items())


@pytest.mark.usefixtures("plant")
@pytest.mark.parametrize("name", REASONS)
def test_a_wrong_or_failing_one_is_not_used_and_the_reason_is_told(name: str, x: torch.Tensor):
    _, report = tune(Slow(), x, candidates=[name], isolate="off")
    assert report.chosen == "eager"
    (row,) = (row for row in report.candidates if row.name == name)
    assert REASONS[name] in row.reason
    assert not row.chosen


@pytest.mark.usefixtures("plant")
def test_what_ends_the_process_ends_only_a_process_of_its_own(x: torch.Tensor, counts: Counts):
    _, report = tune(Slow(), x, candidates=["good", "crashes"])
    rows = {row.name: row.reason for row in report.candidates}
    assert rows["crashes"] == "crashed with SIGSEGV in a process of its own"
    assert report.chosen == "good"
    assert counts.compiled == 1, "what fails there is not compiled here"


@pytest.mark.long
@pytest.mark.usefixtures("plant")
def test_others_can_be_tried_in_a_process_of_their_own_too(x: torch.Tensor, counts: Counts):
    _, report = tune(Slow(), x, candidates=["ts_trace", "exits"], isolate="all")
    rows = {row.name: row for row in report.candidates}
    assert rows["exits"].reason.startswith("ended with exit status 3 in a process of its own")
    assert rows["ts_trace"].error is not None
    assert counts.compiled == 1


@pytest.mark.usefixtures("plant")
def test_a_rehearsal_differentiates_too():
    graph = torch.fx.symbolic_trace(slow)
    weight = torch.rand(40, 50, requires_grad=True)
    for name, problem in (("good", ""), ("detaches", "2 outputs and gradients instead of 3")):
        candidate = {"name": name, "backend": name, "owner": "third-party"}
        options = dataclasses.asdict(AutotuneOptions(candidates=(name,)))
        task = {"candidate": candidate, "options": options, "training": True}
        task |= {"uncopied": [], "mutated": []}
        found = try_candidate(graph, [torch.randn(40, 50), weight], task)
        assert found.endswith(problem)
        assert bool(found) == bool(problem)


@pytest.mark.long
@pytest.mark.usefixtures("plant")
def test_what_hangs_is_ended(x: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mark = tmp_path / "mark"
    monkeypatch.setenv("PLANTED_MARK", str(mark))
    _, report = tune(Slow(), x, candidates=["hangs"], trial_timeout_s=25)
    rows = {row.name: row.reason for row in report.candidates}
    assert rows["hangs"] == "did not finish within 25 s in a process of its own"
    assert mark.read_text() == "it began", "it was ended before it hung"
    assert report.chosen == "eager"


def test_one_that_fails_later_is_replaced_at_that_call(
    x: torch.Tensor, plant: ModuleType, counts: Counts, caplog: pytest.LogCaptureFixture
):
    model = Slow()
    compiled, report = tune(model, x, candidates=["good"], isolate="off")
    assert report.chosen == "good"
    plant.state["broken"] = True
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), model(x))
    assert counts.replaced == 1
    assert report.chosen == "eager"
    text = "good, which autotune had chosen, failed: RuntimeError: the licence has expired"
    assert report.events == [EagerEvent("failed", "graph", text)]
    assert f"{text}; the graph runs in eager from now on" in caplog.text
    torch._dynamo.reset()
    plant.state["broken"] = False
    tune(model, x, candidates=["good"], isolate="off")
    assert counts.sessions == 2, "a decision for a candidate that failed is not kept"


def test_what_fails_in_a_forked_child_is_decided_for_the_parent_still(
    plant: ModuleType, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
):
    compiled, report = tune(Slow(), x, candidates=["good"], isolate="off")
    plant.state["broken"] = True
    monkeypatch.setattr("dynamo_backends.autotune.executables.os.getpid", lambda: -1)
    with torch.no_grad():
        compiled(x)
    assert report.chosen == "eager"
    assert [decision.winner for decision in DecisionStore().all()] == ["good"]


def test_a_mistake_of_the_user_is_not_the_candidates_fault(plant: ModuleType, counts: Counts):
    def fail(_: torch.Tensor) -> Any:
        raise IndexError("index out of range")

    chosen = WinnerCallable("good", fail, fail, (), (), None)
    with pytest.raises(IndexError, match="out of range"):
        chosen(torch.ones(1))
    assert counts.replaced == 0


def test_compiled_code_that_gave_up_is_not_called_again(counts: Counts):
    report = GraphReport("good", "inference")

    def gives_up(x: torch.Tensor) -> list[torch.Tensor]:
        report.events.append(EagerEvent("failed", "block", "RuntimeError: out of licences"))
        return [x + 1]

    def eager(x: torch.Tensor) -> list[torch.Tensor]:
        return [x + 1]

    chosen = WinnerCallable("good", gives_up, eager, (), [report], None)
    for _ in range(3):
        assert torch.equal(chosen(torch.ones(1))[0], torch.full((1,), 2.0))
    assert counts.replaced == 1
    assert report.chosen == "eager"
    assert report.events[1:] == [
        EagerEvent(
            "failed",
            "graph",
            "good, which autotune had chosen, failed: RuntimeError: out of licences",
        )
    ]


def test_half_changed_inputs_are_not_run_again(counts: Counts):
    def writes_and_fails(x: torch.Tensor) -> Any:
        x.add_(1)
        raise RuntimeError("in the middle")

    chosen = WinnerCallable("good", writes_and_fails, lambda x: [x.add_(1)], (0,), (), None)
    with pytest.raises(RuntimeError, match="in the middle"):
        chosen(torch.ones(1))
    assert counts.replaced == 0


@pytest.fixture(autouse=True)
def _logs(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING, "dynamo_backends"):
        yield

"""What holds for every backend holds for autotune, whoever is chosen."""

import copy
import io
import logging
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends.autotune.candidates import iter_candidates
from dynamo_backends.autotune.options import AutotuneOptions
from dynamo_backends.interface.errors import OptionError
from dynamo_backends.runtime.weight_binding import WeightBinding
from dynamo_backends.workers import budget as budgets
from dynamo_backends.workers.progress import Counts, showing
from tests.backend_checks import SEMANTICS, agree

pytestmark = pytest.mark.usefixtures("eager_seems_slow")


@pytest.mark.parametrize("name", SEMANTICS)
def test_semantics(name: str):
    fn, inputs = SEMANTICS[name]
    reports = agree("autotune", fn, *inputs(), candidates=("ts_trace",))
    assert all(r.candidates for r in reports)
    reasons = [row.reason for r in reports for row in r.candidates]
    assert {r.chosen for r in reports} == {"ts_trace"}, reasons


def test_random_numbers_are_eagers():
    fn = lambda x: nn.functional.dropout(x, 0.5) + torch.rand_like(x)  # noqa: E731
    x = torch.ones(50)
    compiler = dynamo_backends.compiler("autotune", candidates=("ts_trace", "inductor"))
    torch.manual_seed(5)
    compiled = torch.compile(fn, backend=compiler)
    results, after = compiled(x), torch.rand(1)
    torch.manual_seed(5)
    torch.testing.assert_close(results, fn(x))
    assert torch.equal(after, torch.rand(1)), "tuning must not draw from the user's generator"


def test_one_choice_for_all_batch_sizes(counts: Counts):
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)).eval()
    compiler = dynamo_backends.compiler("autotune", candidates=("ts_trace",))
    compiled = torch.compile(module, backend=compiler, dynamic=True)
    with dynamo_backends.record() as reports, torch.no_grad():
        for batch in (2, 3, 5):
            x = torch.randn(batch, 8)
            torch.testing.assert_close(compiled(x), module(x))
    assert (counts.sessions, counts.compiled) == (1, 1)
    assert [(r.chosen, r.executables) for r in reports] == [("ts_trace", 1)]


def test_where_openxla_is_chosen_sizes_are_rounded_up(counts: Counts):
    fn = lambda x: (x.relu() + 1).sum(1)  # noqa: E731
    compiler = dynamo_backends.compiler("autotune", candidates=("openxla",))
    compiled = torch.compile(fn, backend=compiler, dynamic=True)
    with dynamo_backends.record() as reports, torch.no_grad():
        for size in (11, 9, 10, 11):
            x = torch.randn(size, 8)
            torch.testing.assert_close(compiled(x), fn(x))
    (report,) = reports
    assert counts.sessions == 1
    assert {row.by for row in report.traffic()} == {"padded"}
    made = [shapes for row in report.traffic() for shapes in row.shapes]
    assert "≤11" in str(made), "timed without padding"


class Cached(nn.Module):
    """Keeps the last rows, and writes the next ones after them."""

    def forward(self, x: Tensor, rows: Tensor, length: Tensor) -> Tensor:
        """Sums of all rows; `length` counts those that there are."""
        at = torch.arange(x.shape[0]) + length
        length.add_(x.shape[0])
        rows.index_copy_(0, at, x)
        return rows.sin().sum(0)


@pytest.mark.parametrize("candidate", ["ts_trace", "inductor_freezing"])
def test_a_position_does_not_grow_while_candidates_are_timed(candidate: str):
    """If it did, rows would be written beyond the end: eager raises, Inductor ends the process."""
    compiler = dynamo_backends.compiler("autotune", candidates=(candidate,))
    compiled, x = torch.compile(Cached(), backend=compiler), torch.randn(3, 8)
    mine, theirs = ((torch.zeros(8, 8), torch.tensor(0)) for _ in range(2))
    with dynamo_backends.record() as reports, torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(x, *mine), Cached()(x, *theirs))
            torch.testing.assert_close(mine, theirs)
    (report,) = reports
    measured = {row.name for row in report.candidates if row.seconds is not None}
    assert measured == {"eager", candidate}


def test_frozen_weights_are_prepared_once(monkeypatch: pytest.MonkeyPatch):
    """Trials and the user's calls are given the same tensors, so that what is timed is real."""
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)).eval()
    compiler = dynamo_backends.compiler("autotune", candidates=("ov",))
    compiled = torch.compile(module, backend=compiler)
    x = torch.randn(3, 8)
    prepared = []
    prepare = WeightBinding._prepare

    def spy(self: WeightBinding, *args: Any) -> Any:
        prepared.append(self)
        return prepare(self, *args)

    monkeypatch.setattr(WeightBinding, "_prepare", spy)
    with dynamo_backends.record() as reports, torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(x), module(x))
    (report,) = reports
    assert report.chosen == "ov"
    assert any(i.frozen for i in report.inputs)
    assert len(prepared) == 1


@pytest.mark.parametrize("objective", ["throughput", "memory"])
def test_other_objectives(objective: str):
    module = nn.Linear(8, 16).eval()
    x = torch.randn(3, 8)
    compiler = dynamo_backends.compiler("autotune", candidates=("ts_trace",), objective=objective)
    with dynamo_backends.record() as reports, torch.no_grad():
        torch.testing.assert_close(torch.compile(module, backend=compiler)(x), module(x))
    (report,) = reports
    assert report.chosen in ("eager", "ts_trace")
    if objective == "memory":
        assert all(row.memory is not None for row in report.candidates)


def test_bfloat16_is_admitted_within_its_tolerance_and_only_when_asked_for():
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    x = torch.randn(16, 64)
    for precision, chosen in (("float32", "eager"), ("bf16", "eager@bf16")):
        compiler = dynamo_backends.compiler("autotune", candidates=("eager",), precision=precision)
        torch._dynamo.reset()
        with dynamo_backends.record() as reports, torch.no_grad():
            results, expected = torch.compile(module, backend=compiler)(x), module(x)
        assert [r.chosen for r in reports] == [chosen]
        assert results.dtype == torch.float32
        row = reports[0].candidates[0]
        assert row.error is not None
        error = float((results - expected).norm() / expected.norm())
        assert (1e-4 < error < 0.02) if precision == "bf16" else error == 0
        assert error == pytest.approx(row.error, rel=0.5, abs=1e-6)


def test_backends_with_an_option_are_told_by_it_to_compute_in_bfloat16():
    options = AutotuneOptions(candidates=("inductor_freezing",), precision="bf16")
    told = {
        c.name: vars(c.backend_options(options))["precision"]
        for c in iter_candidates(options, ["cpu"])
    }
    assert told == {"inductor_freezing": "float32", "inductor_freezing@bf16": "bf16"}


def test_the_budget_leaves_out_whom_it_cannot_pay_for(
    counts: Counts, caplog: pytest.LogCaptureFixture
):
    module = nn.Linear(8, 16).eval()

    def tune(budget_s: float) -> dict[str, str]:
        torch._dynamo.reset()
        compiler = dynamo_backends.compiler(
            "autotune", candidates=("openxla", "ts_trace", "ofi"), budget_s=budget_s
        )
        with dynamo_backends.record() as reports, torch.no_grad():
            torch.compile(module, backend=compiler)(torch.randn(3, 8))
        return {row.name: row.reason for row in reports[0].candidates if row.compile_s is None}

    budgets.renew()
    with caplog.at_level(logging.WARNING, "dynamo_backends"):
        left_out = dict.fromkeys(("ts_trace", "ofi"), "not tried: the budget of 0.001 s is spent")
        assert tune(1e-3) == left_out, "the most promising one is tried in any case"
        assert tune(1e-3) == left_out
    assert counts.sessions == 1
    (message,) = (m for m in caplog.messages if "budget" in m)
    assert message.startswith("autotune's budget of 0.001 s, which all graphs")
    assert "ts_trace, ofi not tried (inference graph " in message
    assert "options={'budget_s': ...}" in message
    for _ in range(2):
        assert tune(600.0) == {}, "with more time than before all are tried"
    assert counts.sessions == 2
    assert tune(60.0) == {}
    assert counts.sessions == 2


@pytest.mark.parametrize("weights", ["the same", "others"])
def test_other_sizes_get_the_winner_of_the_first_beyond_the_budget(counts: Counts, weights: str):
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)).eval()
    compiler = dynamo_backends.compiler(
        "autotune", candidates=("ofi", "ts_trace"), budget_s=1e-3, cache=False
    )
    budgets.renew()
    with dynamo_backends.record() as reports, torch.no_grad():
        compiled = torch.compile(module, backend=compiler)
        compiled(torch.randn(3, 8))
        if weights == "others":
            module[2] = nn.Linear(16, 5).eval()
            torch._dynamo.reset()
            compiled = torch.compile(module, backend=compiler, dynamic=True)
        for batch in (5, 7):
            x = torch.randn(batch, 8)
            torch.testing.assert_close(compiled(x), module(x))
    first, ranged = reports
    assert first.chosen != "eager"
    assert ranged.symbols or weights == "others"
    assert ranged.chosen == (first.chosen if weights == "the same" else "eager")
    assert (counts.sessions, counts.compiled) == ((2, 2) if weights == "the same" else (1, 1))


@pytest.mark.parametrize("name", ["ofi", "inductor_freezing"])
def test_passes_that_make_calls_work_on_symbols_inside_of_a_capture(name: str):
    """Fake tensors of a candidate's graph have another mode than Dynamo's, which goes on."""
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    compiler = dynamo_backends.compiler("autotune", candidates=(name,), cache=False)
    compiled = torch.compile(module, backend=compiler)
    with dynamo_backends.record() as reports, torch.no_grad():
        for batch in (2, 3):
            x = torch.randn(batch, 3, 8, 8)
            torch.testing.assert_close(compiled(x), module(x))
    reasons = [row.reason for r in reports for row in r.candidates]
    assert [r.chosen for r in reports] == [name, name], reasons


def test_what_eager_raises_reaches_the_user(caplog: pytest.LogCaptureFixture):
    table = nn.Embedding(4, 2)
    compiler = dynamo_backends.compiler("autotune", candidates=("ts_trace",))
    compiled = torch.compile(table, backend=compiler)
    with (
        torch.no_grad(),
        caplog.at_level(logging.WARNING, "dynamo_backends"),
        pytest.raises(IndexError, match="out of range"),
    ):
        compiled(torch.tensor([7]))
    assert "autotune failed, and a graph runs in eager: IndexError" in caplog.text


def test_inference_mode(counts: Counts):
    module, x = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16)).train(), torch.randn(3, 8)
    twin = copy.deepcopy(module)
    compiler = dynamo_backends.compiler("autotune", candidates=("ts_trace",))
    with torch.inference_mode(), dynamo_backends.record() as reports:
        compiled = torch.compile(module, backend=compiler)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), twin(x))
    assert [r.chosen for r in reports] == ["ts_trace"]
    for ours, theirs in zip(module.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert counts.sessions == 1


def test_progress_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with showing("a graph") as progress:
            progress("a graph: compiling openxla")
        assert ("compiling openxla" in stream.getvalue()) == shown


def test_explain_shows_the_candidates():
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU()).eval()
    options = {"candidates": ("ts_trace", "ofi"), "budget_s": 1e-3}
    with torch.no_grad():
        explanation = dynamo_backends.explain(
            module, torch.randn(3, 8), backend="autotune", options=options
        )
    ((name, count),) = explanation.chosen
    assert (name, count) == ("ts_trace", 1)
    text = " ".join(str(explanation).split())  # without the breaks of lines
    assert "chosen: ts_trace 1" in text
    for expected in (
        "candidate",
        "why not",
        "eager",
        "times as long as ts_trace",
        "not tried: the",
    ):
        assert expected in text
    rows = explanation.to_dict()["graphs"][0]["reports"][0]["candidates"]
    assert {row["name"] for row in rows} == {"eager", "ofi", "ts_trace"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"candidates": ("onxrt",)}, "not a known backend. Did you mean 'onnxrt'?"),
        ({"candidates": ("autotune",)}, "not a known backend"),
        ({"budget_s": 0}, "must be more than 0 seconds, not 0"),
        ({"objective": "speed"}, "one of 'latency', 'throughput', 'memory'"),
        ({"isolate": True}, "one of 'third-party', 'all', 'off'"),
    ],
)
def test_options_are_checked(options: dict[str, object], text: str):
    with pytest.raises(OptionError) as info:
        dynamo_backends.compiler("autotune", **options)
    assert text in str(info.value)

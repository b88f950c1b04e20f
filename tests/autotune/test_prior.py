"""What is expected of candidates before anything is compiled, and what an error in it costs."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import dynamo_backends
from dynamo_backends.autotune import tuning_subjects
from dynamo_backends.autotune.cost_model import UNKNOWN, CostModel, GraphFeatures, Prior, PriorRow
from dynamo_backends.autotune.flop_features import compute_flop_features
from dynamo_backends.autotune.options import AutotuneOptions
from dynamo_backends.autotune.session import (
    PreparedCandidate,
    SessionOutcome,
    TuningSession,
    Workload,
)
from dynamo_backends.autotune.trial_inputs import TrialInputs
from dynamo_backends.interface.report import CandidateReport
from dynamo_backends.workers import race
from dynamo_backends.workers.budget import Budget
from dynamo_backends.workers.progress import Progress
from tests.autotune.test_decisions import decision

CONVOLUTIONS = {"flops": 9.0, "convolution_work": 1.0}
PRODUCTS = {"flops": 9.0, "product_work": 0.6, "attention_work": 0.4}


def table(spread: float = 0.1, **speedups: tuple[float, float]) -> Prior:
    """A prior of candidates' speedups in graphs of convolutions and of products."""
    rows = {name: PriorRow(0.05, *of, 1.0, spread) for name, of in speedups.items()}
    return Prior({"inference": rows})


def described(work: dict[str, float]) -> GraphFeatures:
    return GraphFeatures("inference", 100, work)


def captured(model: nn.Module, *inputs: Tensor) -> dict[str, float]:
    found = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        found.append(compute_flop_features(graph))
        return graph.forward

    torch.compile(model, backend=backend)(*inputs)
    return found[0]


# Work.


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(8, 16, 3, padding=1)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.linear = nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.depthwise(self.wide(x)).relu()
        x = self.linear(x.flatten(2).transpose(1, 2))
        return F.scaled_dot_product_attention(x, x, x)


def test_work_is_counted_by_kind():
    found = captured(Mixed(), torch.randn(2, 8, 4, 4))
    wide, depthwise = 2 * 2 * 16 * 16 * 8 * 9, 2 * 2 * 16 * 16 * 9
    product, attention = 2 * 2 * 16 * 32 * 16, 4 * 2 * 16 * 32 * 16
    total = wide + depthwise + product + attention
    assert found["flops"] == pytest.approx(math.log2(total))
    assert found["convolution_work"] == pytest.approx((wide + depthwise) / total)
    assert found["product_work"] == pytest.approx(product / total)
    assert found["attention_work"] == pytest.approx(attention / total)


def test_graphs_of_operators_count_as_those_of_functions():
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(3, 8)
    functions = captured(model, x)
    traced = make_fx(lambda p, x: functional_call(model, p, x), tracing_mode="fake")
    operators = compute_flop_features(traced(dict(model.named_parameters()), x))
    assert operators == pytest.approx(functions)
    assert operators["product_work"] == 1


def test_symbolic_sizes_count_as_they_are():
    found = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        found.append(compute_flop_features(graph))
        return graph.forward

    model = torch.compile(nn.Linear(8, 16), backend=backend, dynamic=True)
    model(torch.randn(3, 8))
    assert found[0]["flops"] == pytest.approx(math.log2(2 * 3 * 8 * 16))


def test_a_graph_without_products_has_no_work():
    assert not any(captured(nn.ReLU(), torch.randn(3)).values())


# Predictions.


def test_the_order_follows_the_graph():
    known = table(a=(2.0, 1.1), b=(1.2, 1.9), c=(0.5, 0.5))
    order = {
        kind: CostModel([], described(graph), known).rank_candidates(["c", "b", "a"])
        for kind, graph in (("convolutions", CONVOLUTIONS), ("products", PRODUCTS))
    }
    assert order == {"convolutions": ["a", "b", "c"], "products": ["b", "a", "c"]}


def test_own_decisions_correct_what_is_expected():
    known, graph = table(a=(2.0, 2.0), b=(1.5, 1.5)), described(PRODUCTS)
    rows = (row("a", 0.8), row("b", 1.6), CandidateReport("openxla"))
    past = [decision(f"{i:064x}", ops=100, candidates=rows, features=PRODUCTS) for i in range(8)]
    assert CostModel([], graph, known).rank_candidates(["b", "a"]) == ["a", "b"]
    assert CostModel(past, graph, known).rank_candidates(["b", "a"]) == ["b", "a"]
    other = CostModel(past, described(CONVOLUTIONS), known)
    assert other.rank_candidates(["b", "a"]) == ["a", "b"], "another graph says little of this one"


def row(name: str, speedup: float) -> CandidateReport:
    return CandidateReport(name, "", 1.0, 0.0, 1 / speedup, (speedup, speedup, speedup))


def test_others_than_those_of_the_table_may_be_anything():
    known, graph = Prior(), GraphFeatures()
    order = CostModel([], graph, known).rank_candidates(
        ["unheard_of", "ofi", "onnxrt", "inductor_freezing"]
    )
    assert order[-1] == "unheard_of"
    assert CostModel([], graph, known).predict("unheard_of").max_speedup == math.inf
    assert known.estimate("unheard_of", graph).gain == math.log(UNKNOWN.other)


def test_int8_is_expected_to_be_faster_and_to_take_longer():
    plain, int8, bf16 = (
        Prior().estimate(f"ov{precision}", described(PRODUCTS))
        for precision in ("", "@int8", "@bf16")
    )
    assert int8.gain > plain.gain
    assert int8.compile_s > plain.compile_s
    assert bf16 == plain


@pytest.mark.parametrize("kind", ["forward", "backward", "training", "step"])
def test_of_what_is_trained_inductor_is_tried_first(kind: str):
    """Not who is fastest in inference."""
    model = CostModel([], GraphFeatures(kind, 10, CONVOLUTIONS))
    first, *_, last = model.rank_candidates(["onnxrt", "ov", "openxla", "inductor", "unheard_of"])
    assert first == "inductor"
    assert last in ("onnxrt", "ov", "openxla")


def test_a_steps_calls_compile_faster():
    """Most of them are an optimizer's."""
    step = CostModel([], GraphFeatures("step", 4000)).predict("inductor").compile_s
    forward = CostModel([], GraphFeatures("forward", 4000)).predict("inductor").compile_s
    assert step < forward / 2


def test_who_cannot_be_compiled_in_time_comes_last():
    model = CostModel([], described(PRODUCTS))
    first, *others = model.rank_candidates(["openxla", "ov", "inductor_freezing", "onnxrt"])
    names = [*others, first]
    assert first == "inductor_freezing"
    assert model.rank_candidates(names, model.predict(first).compile_s - 0.01) == names
    # Where nobody can, by what each promises for a second.
    assert model.rank_candidates(names, 0.0)[0] == "ov"


# In a session.

SECONDS = {"eager": 1.0, "a": 0.5, "b": 0.25, "c": 0.8, "wrong": 0.01}


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[SessionOutcome, list[str]]]:
    """Runs a session of a, b, c and a wrong one on a clock of its own; who was compiled."""
    now = [0.0]
    monkeypatch.setattr(race, "time", SimpleNamespace(sleep=lambda s: None))
    monkeypatch.setattr(race, "running_s", lambda: now[0])

    def run(name: str) -> Callable[[list[Any]], list[Tensor]]:
        def call(args: list[Any]) -> list[Tensor]:
            now[0] += SECONDS[name]
            return [args[0] * (3 if name == "wrong" else 2)]

        return call

    def decide(
        known: Prior, progress: Progress | None = None, **options: Any
    ) -> tuple[SessionOutcome, list[str]]:
        compiled: list[str] = []

        def build(name: str) -> Callable[[list[Any]], list[Tensor]]:
            compiled.append(name)
            now[0] += 10
            return run(name)

        subject = Workload(run("eager"), None, TrialInputs([torch.ones(3)], (), ()))
        given = AutotuneOptions(**{"budget_s": 1000, **options})
        prepared = [PreparedCandidate(n, lambda n=n: build(n)) for n in SECONDS if n != "eager"]
        model = CostModel([], described(PRODUCTS), known)
        budget = Budget(given.budget_s, clock=lambda: now[0])
        with budget.spending():
            made = TuningSession(subject, prepared, given, model, budget, progress or Progress())
            return made.choose_winner(), compiled

    return decide


WORST_FIRST = {"wrong": (9, 9), "c": (8, 8), "a": (7, 7), "b": (6.9, 6.9)}


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.3])
def test_a_prior_that_errs_changes_the_order_alone(
    spread: float, session: Callable[..., tuple[SessionOutcome, list[str]]]
):
    outcome, compiled = session(table(spread, **WORST_FIRST))
    assert compiled[0] == "wrong"
    assert sorted(compiled) == ["a", "b", "c", "wrong"]
    assert outcome.winner == "b"
    reasons = {r.name: r.reason for r in outcome.rows}
    assert "wrong: " in reasons["wrong"]


def test_the_first_that_is_right_and_faster_leads(
    session: Callable[..., tuple[SessionOutcome, list[str]]],
):
    class Leaders(Progress):
        wants_leader = True

        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def leads(self, name: str) -> None:
            self.names.append(name)

    heard = Leaders()
    outcome, compiled = session(table(0.3, **WORST_FIRST), heard)
    assert compiled[0] == "wrong"
    assert heard.names == [compiled[1]], "others are raced against it at the end"
    assert outcome.winner == "b"


def test_who_is_expected_to_lose_is_not_compiled(
    session: Callable[..., tuple[SessionOutcome, list[str]]],
):
    known = table(0.05, wrong=(0.1, 0.1), b=(4.0, 4.0), a=(3.8, 3.8), c=(1.2, 1.2))
    outcome, compiled = session(known)
    assert compiled == ["b", "a"]
    assert outcome.winner == "b"
    assert outcome.short_of_s == 0
    reasons = {r.name: r.reason for r in outcome.rows}
    assert reasons["c"].startswith("not tried: its predicted speedup over eager is at most 1.3")


@pytest.mark.parametrize(
    "options", [{"candidates": ("eager",)}, {"objective": "memory"}], ids=["named", "memory"]
)
def test_named_candidates_are_all_tried(
    options: dict[str, Any], session: Callable[..., tuple[SessionOutcome, list[str]]]
):
    known = table(0.05, wrong=(0.1, 0.1), b=(4.0, 4.0), a=(3.8, 3.8), c=(1.2, 1.2))
    _, compiled = session(known, **options)
    assert compiled == ["b", "a", "c", "wrong"]


def test_the_most_promising_one_is_finished_on_any_budget(
    session: Callable[..., tuple[SessionOutcome, list[str]]],
):
    outcome, compiled = session(table(b=(4.0, 4.0), a=(3.9, 3.9)), budget_s=1)
    assert compiled == ["b"]
    assert outcome.winner == "b"
    assert outcome.short_of_s == 1


def test_who_was_left_out_is_not_tried_after_the_budget(
    session: Callable[..., tuple[SessionOutcome, list[str]]],
):
    known = table(0.01, c=(8, 8), a=(1.5, 1.5), b=(1.4, 1.4), wrong=(0.5, 0.5))
    outcome, compiled = session(known, budget_s=12)
    assert compiled == ["c"]
    assert outcome.winner == "c"
    reasons = {r.name: r.reason for r in outcome.rows}
    assert "budget of 12 s" in reasons["a"]
    assert outcome.short_of_s == 12


def test_a_graph_that_cannot_be_described_is_tuned_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def failing(graph: torch.fx.GraphModule) -> dict[str, float]:
        raise TypeError("planted")

    monkeypatch.setenv("DYNAMO_BACKENDS_CHECK", "0")  # as users have it: it is contained
    monkeypatch.setattr(tuning_subjects, "compute_flop_features", failing)
    x = torch.randn(3, 8)
    options = {"candidates": ["ts_trace"], "isolate": "off"}
    model = nn.Linear(8, 8)
    with torch.no_grad(), dynamo_backends.record() as reports:
        compiled = torch.compile(model, backend="autotune", options=options)
        torch.testing.assert_close(compiled(x), model(x))
    assert {row.name for row in reports[0].candidates} == {"eager", "ts_trace"}
    assert "planted" in caplog.text

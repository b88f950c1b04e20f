"""What is expected of candidates before anything is compiled, and what an error in it costs."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import dynamo_backends
from dynamo_backends.autotune import flow
from dynamo_backends.autotune.arguments import Arguments
from dynamo_backends.autotune.cost import CostModel
from dynamo_backends.autotune.identity import environment
from dynamo_backends.autotune.options import AutotuneOptions
from dynamo_backends.autotune.priors import (
    Described,
    Prior,
    graph_features,
    hand,
    machine_features,
    prior,
)
from dynamo_backends.autotune.priors.table import Learned, Table
from dynamo_backends.autotune.session import Outcome, PreparedCandidate, Subject, TuningSession
from dynamo_backends.interface.report import CandidateReport
from dynamo_backends.tuning import race
from dynamo_backends.tuning.budget import Budget
from dynamo_backends.tuning.progress import Progress
from tests.autotune.test_decisions import decision
from tests.bench.programs import load

priors = load("tools/priors.py")

HERE = {"avx2": 1.0, "threads": 1.0}
CONVOLUTIONS = {"work": 0.0, "calls": 6.0}
PRODUCTS = {"work": 1.0, "calls": 6.0}


def table(spread: float = 0.1, **gains: tuple[float, float]) -> Table:
    """Speedups of candidates in a graph of convolutions and in one of products."""
    learned = {
        name: Learned(0.0, {0: math.log(first), 1: math.log(second)}, spread)
        for name, (first, second) in gains.items()
    }
    return Table(
        scales={"work": 0.1, "calls": 1.0},
        centers={"work": 0.0, "calls": 0.0},
        width=1.0,
        machine_scales={"avx2": 0.5, "threads": 1.0},
        machines=[HERE],
        points=[[0.0, 6.0], [10.0, 6.0]],
        machine_of=[0, 0],
        candidates={"inference": learned},
    )


def described(graph: Mapping[str, float], machine: Mapping[str, float] = HERE) -> Described:
    return Described("inference", 100, graph, machine)


def captured(model: nn.Module, *inputs: Tensor) -> dict[str, float]:
    found = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        found.append(graph_features(graph))
        return graph.forward

    torch.compile(model, backend=backend)(*inputs)
    return found[0]


# Features.


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
    assert found["depthwise_work"] == pytest.approx(depthwise / total)
    assert found["product_work"] == pytest.approx(product / total)
    assert found["attention_work"] == pytest.approx(attention / total)
    assert found["batch"] == 1
    assert found["bits"] == 32
    assert found["product_size"] == pytest.approx(math.log2(product))


def test_graphs_of_operators_count_as_those_of_functions():
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(3, 8)
    functions = captured(model, x)
    traced = make_fx(lambda p, x: functional_call(model, p, x), tracing_mode="fake")
    operators = graph_features(traced(dict(model.named_parameters()), x))
    for name in ("flops", "product_work", "product_size"):
        assert operators[name] == pytest.approx(functions[name]), name


def test_symbolic_sizes_count_as_they_are():
    found = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        found.append(graph_features(graph))
        return graph.forward

    model = torch.compile(nn.Linear(8, 16), backend=backend, dynamic=True)
    model(torch.randn(3, 8))
    assert found[0]["flops"] == pytest.approx(math.log2(2 * 3 * 8 * 16))
    assert found[0]["dynamic"] == 1


def test_machines_are_told_by_instructions_maker_and_threads():
    given = {"processor_class": "x86_64 avx512_core_bf16", "processor_family": "AuthenticAMD 26"}
    found = machine_features({**given, "cores": 2, "threads": 4, "devices": ["cpu"]})
    flags = ("avx512", "bf16", "amx", "amd", "intel", "family", "cores", "threads", "gpu")
    assert [found[flag] for flag in flags] == [1, 1, 0, 1, 0, 26, 1, 2, 0]
    assert machine_features(environment(["cpu"]))["threads"] == math.log2(torch.get_num_threads())
    assert not any(machine_features({}).values())


# Predictions.


def test_the_order_follows_the_graph():
    known = Prior(table(a=(2.0, 1.1), b=(1.2, 1.9), c=(0.5, 0.5)))
    order = {
        kind: CostModel([], described(graph), known).order(["c", "b", "a"])
        for kind, graph in (("convolutions", CONVOLUTIONS), ("products", PRODUCTS))
    }
    assert order == {"convolutions": ["a", "b", "c"], "products": ["b", "a", "c"]}


def test_a_graph_like_no_recorded_one_gets_the_mean():
    known = Prior(table(a=(2.0, 1.1)))
    assert known.expect("a", described({"work": 50.0, "calls": 6.0})).gain == pytest.approx(0)


def test_on_an_unseen_processor_the_order_is_that_of_the_nearest():
    known = Prior(table(a=(2.0, 1.1), b=(1.2, 1.9)))
    unseen = described(PRODUCTS, {"avx2": 1.0, "avx512": 1.0, "threads": 6.0})
    assert CostModel([], unseen, known).order(["a", "b"]) == ["b", "a"]
    here, there = (known.expect("b", each) for each in (described(PRODUCTS), unseen))
    assert there.gain == pytest.approx(here.gain)
    assert there.spread > 2 * here.spread


def test_own_decisions_correct_what_is_expected():
    known, graph = Prior(table(a=(2.0, 2.0), b=(1.5, 1.5))), described(PRODUCTS)
    rows = (row("a", 0.8), row("b", 1.6), CandidateReport("openxla"))
    past = [decision(f"{i:064x}", ops=100, candidates=rows, features=PRODUCTS) for i in range(8)]
    assert CostModel([], graph, known).order(["b", "a"]) == ["a", "b"]
    assert CostModel(past, graph, known).order(["b", "a"]) == ["b", "a"]
    other = CostModel(past, described(CONVOLUTIONS), known)
    assert other.order(["b", "a"]) == ["a", "b"], "another graph says little of this one"


def row(name: str, speedup: float) -> CandidateReport:
    return CandidateReport(name, "", 1.0, 0.0, 1 / speedup, (speedup, speedup, speedup))


def test_without_a_table_what_is_written_by_hand_decides():
    known = Prior()
    names = ["unheard_of", "ofi", "onnxrt", "inductor_freezing"]
    order = CostModel([], Described(), known).order(names)
    assert order[-1] == "unheard_of"
    assert CostModel([], Described(), known).predict("unheard_of").at_most == math.inf
    assert hand.family_of({"flops": 9, "convolution_work": 0.7}) == "convolutions"
    assert hand.family_of({"flops": 9, "product_work": 0.4, "attention_work": 0.3}) == "products"


@pytest.mark.parametrize("kind", ["forward", "backward", "training", "step"])
def test_of_what_is_trained_inductor_is_tried_first(kind: str):
    """Not who is fastest in inference."""
    convolutions = {"flops": 9.0, "convolution_work": 1.0}
    model = CostModel([], Described(kind, 10, convolutions), Prior())
    first, *_, last = model.order(["onnxrt", "ov", "openxla", "inductor", "unheard_of"])
    assert first == "inductor"
    assert last in ("onnxrt", "ov", "openxla")


def test_a_steps_calls_compile_faster():
    """Most of them are an optimizer's."""
    step = CostModel([], Described("step", 4000), Prior()).predict("inductor").compile_s
    forward = CostModel([], Described("forward", 4000), Prior()).predict("inductor").compile_s
    assert step < forward / 2


def test_who_cannot_be_compiled_in_time_comes_last():
    model = CostModel([], described(PRODUCTS), Prior())
    first, *others = model.order(["openxla", "ov", "inductor_freezing", "onnxrt"])
    names = [*others, first]
    assert first == "inductor_freezing"
    assert model.order(names, model.predict(first).compile_s - 0.01) == names
    # Where nobody can, by what each promises for a second.
    assert model.order(names, 0.0)[-1] == "inductor_freezing"


def test_a_table_that_cannot_be_read_costs_the_order_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "table.json").write_text('{"format": 0}')
    monkeypatch.setattr(prior, "TABLE", tmp_path / "table.json")
    found = prior.shipped.__wrapped__()
    assert found.expect("ov", described(PRODUCTS)).spread == hand.SPREAD
    assert "no table of the format" in caplog.text


def test_the_shipped_table_knows_this_machine_s_graphs():
    known = Table.read(prior.TABLE)
    assert Table.from_json(known.to_json()) == known
    assert set(known.candidates["inference"]) >= {"inductor_freezing", "ov", "onnxrt", "openxla"}
    features = captured(Mixed(), torch.randn(2, 8, 4, 4))
    assert set(known.scales) <= set(features)
    assert set(known.machine_scales) == set(machine_features({}))


# In a session.

SECONDS = {"eager": 1.0, "a": 0.5, "b": 0.25, "c": 0.8, "wrong": 0.01}


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Outcome, list[str]]]:
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
    ) -> tuple[Outcome, list[str]]:
        compiled: list[str] = []

        def build(name: str) -> Callable[[list[Any]], list[Tensor]]:
            compiled.append(name)
            now[0] += 10
            return run(name)

        subject = Subject(run("eager"), None, Arguments([torch.ones(3)], (), ()))
        given = AutotuneOptions(**{"budget_s": 1000, **options})
        prepared = [PreparedCandidate(n, lambda n=n: build(n)) for n in SECONDS if n != "eager"]
        model = CostModel([], described(PRODUCTS), known)
        budget = Budget(given.budget_s, clock=lambda: now[0])
        with budget.spending():
            made = TuningSession(subject, prepared, given, model, budget, progress or Progress())
            return made.decide(), compiled

    return decide


WORST_FIRST = {"wrong": (9, 9), "c": (8, 8), "a": (7, 7), "b": (6.9, 6.9)}


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.3])
def test_a_prior_that_errs_changes_the_order_alone(
    spread: float, session: Callable[..., tuple[Outcome, list[str]]]
):
    outcome, compiled = session(Prior(table(spread, **WORST_FIRST)))
    assert compiled[0] == "wrong"
    assert sorted(compiled) == ["a", "b", "c", "wrong"]
    assert outcome.winner == "b"
    reasons = {r.name: r.reason for r in outcome.rows}
    assert "wrong: " in reasons["wrong"]


def test_the_first_that_is_right_and_faster_leads(
    session: Callable[..., tuple[Outcome, list[str]]],
):
    class Leaders(Progress):
        wants_leader = True

        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def leads(self, name: str) -> None:
            self.names.append(name)

    heard = Leaders()
    outcome, compiled = session(Prior(table(0.3, **WORST_FIRST)), heard)
    assert compiled[0] == "wrong"
    assert heard.names == [compiled[1]], "others are raced against it at the end"
    assert outcome.winner == "b"


def test_who_is_expected_to_lose_is_not_compiled(
    session: Callable[..., tuple[Outcome, list[str]]],
):
    known = Prior(table(0.05, wrong=(0.1, 0.1), b=(4.0, 4.0), a=(3.8, 3.8), c=(1.2, 1.2)))
    outcome, compiled = session(known)
    assert compiled == ["b", "a"]
    assert outcome.winner == "b"
    assert outcome.short_of_s == 0
    reasons = {r.name: r.reason for r in outcome.rows}
    assert reasons["c"].startswith("not tried: it is expected to be at most 1.3")


@pytest.mark.parametrize(
    "options", [{"candidates": ("eager",)}, {"objective": "memory"}], ids=["named", "memory"]
)
def test_named_candidates_are_all_tried(
    options: dict[str, Any], session: Callable[..., tuple[Outcome, list[str]]]
):
    known = Prior(table(0.05, wrong=(0.1, 0.1), b=(4.0, 4.0), a=(3.8, 3.8), c=(1.2, 1.2)))
    _, compiled = session(known, **options)
    assert compiled == ["b", "a", "c", "wrong"]


def test_the_most_promising_one_is_finished_on_any_budget(
    session: Callable[..., tuple[Outcome, list[str]]],
):
    outcome, compiled = session(Prior(table(b=(4.0, 4.0), a=(3.9, 3.9))), budget_s=1)
    assert compiled == ["b"]
    assert outcome.winner == "b"
    assert outcome.short_of_s == 1


def test_who_was_left_out_is_not_tried_after_the_budget(
    session: Callable[..., tuple[Outcome, list[str]]],
):
    known = Prior(table(0.01, c=(8, 8), a=(1.5, 1.5), b=(1.4, 1.4), wrong=(0.5, 0.5)))
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
    monkeypatch.setattr(flow, "graph_features", failing)
    x = torch.randn(3, 8)
    options = {"candidates": ["ts_trace"], "isolate": "off"}
    model = nn.Linear(8, 8)
    with torch.no_grad(), dynamo_backends.record() as reports:
        compiled = torch.compile(model, backend="autotune", options=options)
        torch.testing.assert_close(compiled(x), model(x))
    assert {row.name for row in reports[0].candidates} == {"eager", "ts_trace"}
    assert "planted" in caplog.text


# Learning.


def made_up(model: int, machine: str = "x86_64 avx2") -> dict[str, Any]:
    """A graph whose share of products says who is fast: a with none, b with all."""
    share = model % 10 / 9
    speedups = {"a": 2.0 - share, "b": 1.0 + share}
    rows = {name: {"speedup": s, "compile_s": 0.3 + 0.1 * 50} for name, s in speedups.items()}
    return {
        "model": f"model {model}",
        "kind": "inference",
        "ops": 50,
        "features": {"work": share, "calls": 5.0 + model / 100},
        "environment": {"processor_class": machine, "cores": 2, "threads": 2},
        "candidates": rows,
    }


def test_learning_finds_who_is_fast_where_and_what_it_takes():
    records = [priors.of_record(made_up(i)) for i in range(20)]
    known = Prior(priors.learn(records, 1.0, 0.03))
    machine = records[0].described.machine
    for share, order in ((0.05, ["a", "b"]), (0.95, ["b", "a"])):
        graph = Described("inference", 50, {"work": share, "calls": 5.1}, machine)
        model = CostModel([], graph, known)
        assert model.order(["b", "a"]) == order
        assert model.predict("a").compile_s == pytest.approx(5.3, rel=0.05)
    left_out = priors.held_out(records, 1.0, 0.03, priors.by_model)
    near = [priors.of_best(r, p.__getitem__) for r, p in zip(records, left_out, strict=True)]
    assert sum(part >= 0.95 for part in near) >= 18
    shuffled = priors.held_out(records, 1.0, 1e9, priors.by_model)
    far = [priors.of_best(r, p.__getitem__) for r, p in zip(records, shuffled, strict=True)]
    assert sum(far) < sum(near), "the error does not see what the features say"


def test_how_good_first_choices_are_is_kept_for_a_page(tmp_path: Path):
    file, kept = tmp_path / "records.json", tmp_path / "judged.json"
    rows = [made_up(i, f"avx{2 + i % 2}") for i in range(20)]
    file.write_text(json.dumps({"records": rows}))
    assert priors.main(["judge", str(file), "--json", str(kept)]) == 0
    table, of_all, elsewhere = priors.published(json.loads(kept.read_text()))
    found = dict(zip(table.columns[0].cells, table.columns[1].cells, strict=True))
    assert int(found["learnt from the others"].split()[0]) >= 18
    assert found["always a"] == "10 of 20"
    assert of_all == "Learnt from 20 graphs of 20 models on 2 processors."
    assert elsewhere.startswith("Learnt without any graph of the processor: ")


def test_what_is_kept_of_decisions_is_all_that_is_learned_from(tmp_path: Path):
    rows = (row("a", 2.0), row("eager", 1.0), CandidateReport("openxla"))
    made = decision(ops=7, candidates=rows, features=PRODUCTS)
    content = {"decisions": [made.to_dict()], "models": {made.key: "net"}}
    exported, kept = tmp_path / "exported.json", tmp_path / "kept.json"
    exported.write_text(json.dumps(content))
    assert priors.main(["keep", str(exported), "--out", str(kept)]) == 0
    assert list(priors.read(kept)) == list(priors.read(exported))


def test_what_is_learnt_adds_to_what_is_written_by_hand():
    """Of graphs like none that was seen, the family still says who is fast."""
    given = made_up(0)["candidates"]["a"]
    records = []
    for i in range(20):
        row = made_up(i)
        gains = {"ov": math.exp(hand.base_gain("ov", Described(graph=row["features"])) + 0.2)}
        row["candidates"] = {name: given | {"speedup": s} for name, s in gains.items()}
        records.append(priors.of_record(row))
    known, machine = Prior(priors.learn(records, 1.0, 0.03)), records[0].described.machine
    for graph in ({"flops": 9.0, "product_work": 1.0}, {"flops": 9.0, "convolution_work": 1.0}):
        unlike = graph | {"work": 90.0, "calls": 5.0}
        expected = hand.base_gain("ov", Described(graph=graph)) + 0.2
        found = known.expect("ov", Described("inference", 50, unlike, machine)).gain
        assert found == pytest.approx(expected, abs=0.01)
    assert hand.base_gain("unheard_of", Described()) == 0


def test_the_width_is_the_one_whose_first_choice_is_fast():
    records = [priors.of_record(made_up(i)) for i in range(20)]
    width, ridge = priors.best(records)
    predicted = priors.held_out(records, width, ridge, priors.by_model)
    pairs = zip(records, predicted, strict=True)
    assert all(priors.of_best(r, p.__getitem__) > 0.9 for r, p in pairs)


def test_exported_decisions_are_records():
    rows = (row("a", 2.0), CandidateReport("b", "wrong", 3.0), CandidateReport("openxla"))
    found = priors.of_decision(decision(ops=7, candidates=rows, features=PRODUCTS))
    assert found.gains == {"a": pytest.approx(math.log(2))}
    assert found.tried == {"a": True, "b": False}
    assert found.rates["b"] == pytest.approx(2.7 / 7)
    assert found.described.graph == PRODUCTS

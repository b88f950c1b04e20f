"""A schedule is used only if it is right and certainly faster than the default one."""

import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from dynamo_backends.tvm.measuring import Bench, agree, signature
from dynamo_backends.tvm.worker import Worker
from dynamo_backends.workers.race import Race
from tests.tvm.tuning_checks import ADD, MATMUL, isolated, parsed

__all__ = ["isolated"]
pytestmark = pytest.mark.usefixtures("isolated")

SLEEP_S = 0.003


@pytest.fixture
def bench() -> Bench:
    return Bench(parsed(MATMUL), 2, 1, 1)


def slowed(run: Any) -> Any:
    def slow(args: list[Tensor]) -> None:
        time.sleep(SLEEP_S)
        run(args)

    return slow


def attempted(bench: Bench) -> Any:
    made = bench.attempt()
    assert made is not None
    return made[0].trace


def test_a_faster_one_wins(bench: Bench):
    traces = [attempted(bench) for _ in range(2)]
    bench._default = slowed(bench._default)
    decision = bench.decide(traces)
    assert decision is not None
    place, mark, gain = decision
    assert place in (0, 1)
    assert len(mark) == 16
    assert gain.low > 1


def test_the_default_one_wins_where_others_are_slower(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    trace = attempted(bench)
    original = bench.compiled
    monkeypatch.setattr(bench, "compiled", lambda function: slowed(original(function)))
    assert bench.decide([trace]) is None


def test_the_default_one_wins_where_others_are_equal(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    trace = attempted(bench)
    noise = random.Random(0)

    def sample(race: Race, run: Any, repeat: int) -> float:
        return 1 + 0.02 * noise.random()

    monkeypatch.setattr(Race, "_sample", sample)
    assert bench.decide([trace]) is None


def off_by_one(run: Any) -> Any:
    def wrong(args: list[Tensor]) -> None:
        run(args)
        args[-1][3, 5] += 1

    return wrong


def unwritten(run: Any) -> Any:
    def wrong(args: list[Tensor]) -> None:
        kept = args[-1][-1].clone()
        run(args)
        args[-1][-1] = kept

    return wrong


def wrong_with_positive_numbers(run: Any) -> Any:
    def wrong(args: list[Tensor]) -> None:
        run(args)
        if (args[0] > 0).all():
            args[-1].neg_()

    return wrong


@pytest.mark.parametrize("spoil", [off_by_one, unwritten])
def test_a_wrong_one_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch, spoil: Any):
    trace = attempted(bench)
    bench._default = slowed(bench._default)
    assert bench.decide([trace]) is not None
    original = bench.compiled
    monkeypatch.setattr(bench, "compiled", lambda function: spoil(original(function)))
    with pytest.raises(ValueError, match="its results are not those of the default schedule"):
        bench.attempt()
    assert bench.refused == []
    assert bench.decide([trace]) is None
    (reason,) = bench.refused
    assert "schedule 0: ValueError: its results are not those of the default schedule" in reason


def test_in_the_end_results_are_compared_on_other_inputs_too(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    bench._default = slowed(bench._default)
    original = bench.compiled
    monkeypatch.setattr(
        bench, "compiled", lambda function: wrong_with_positive_numbers(original(function))
    )
    assert bench.decide([attempted(bench)]) is None


def test_a_trace_that_does_not_fit_is_refused(bench: Bench):
    assert bench.decide([{"tile": [5, 7]}, [["nonsense"], []], 3]) is None


def test_results_agree_up_to_rounding():
    x = torch.tensor([1.0, -200.0, float("nan"), float("inf")])
    assert agree(x, x * (1 + 1e-6))
    assert not agree(x, x + torch.tensor([0.1, 0, 0, 0]))
    assert not agree(x, torch.tensor([1.0, -200.0, 3.0, float("inf")]))
    assert not agree(x, torch.tensor([1.0, -200.0, float("nan"), -float("inf")]))
    assert not agree(x[:2], torch.tensor([1.0, float("nan")]))
    assert agree(x[:0], x[:0])
    assert not agree(torch.tensor([True, False]), torch.tensor([True, True]))


@pytest.mark.parametrize(("dtype", "known"), [("float64", True), ("bool", True), ("int64", False)])
def test_integers_are_not_made_up(dtype: str, known: bool):
    text = ADD.replace("a[x, y] + a[x, y]", "a[x, y]")
    parameter = parsed(text, dtype).params[0]
    if known:
        assert signature(parameter) == ([2, 2], getattr(torch, dtype))
    else:
        with pytest.raises(ValueError, match="a parameter is a tensor of int64"):
            signature(parameter)


def test_a_worker_says_what_is_wrong():
    worker = Worker()
    assert "no function is being tuned" in worker.answer({"do": "attempt"})["problem"]
    request = {"do": "open", "function": MATMUL, "inputs": 2, "threads": 1, "seed": 1}
    answer = worker.answer({**request, "expected": "other"})
    assert "TVM cannot read the program that it has written" in answer["problem"]

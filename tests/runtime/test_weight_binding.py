"""When weights are prepared, given up as constants, and asked again (docs/verification.md)."""

from collections.abc import Callable, Collection, Sequence

import pytest
import torch
from torch import Tensor

from dynamo_backends import Executable, GraphReport
from dynamo_backends.interface.executable import Bound
from dynamo_backends.runtime.weight_binding import (
    ASK_AGAIN,
    MODELS,
    MOST_MODELS,
    WASTED,
    WeightBinding,
)


class Adding(Executable):
    """Adds the sum of its weights, which it prepares; notes each way of binding.

    Args:
        has_live: Whether it also reads weights where they are.
    """

    def __init__(self, has_live: bool):
        self._has_live = has_live
        self.made: list[str] = []

    def bind(self, weights: Sequence[Tensor]) -> tuple[Bound, Collection[int]]:
        self.made.append("prepared")
        total = sum(float(w.sum()) for w in weights)
        return lambda activations: [x + total for x in activations], range(len(weights))

    def bind_live(self, weights: Sequence[Tensor]) -> tuple[Bound, Collection[int]] | None:
        if not self._has_live:
            return None
        self.made.append("live")
        weights = [w.detach() for w in weights]
        return lambda inputs: [x + sum(float(w.sum()) for w in weights) for x in inputs], ()


class Bench:
    """A binding that is called with checks of its results."""

    def __init__(self, has_live: bool):
        self.executable = Adding(has_live)
        self.report = GraphReport("adding", "inference")
        self.binding = WeightBinding(self.executable, "probe", self.report)

    def __call__(self, *weights: Tensor) -> None:
        (result,) = self.binding.bind(weights)([torch.zeros(())])
        assert float(result) == sum(float(w.sum()) for w in weights)

    @property
    def made(self) -> list[str]:
        return self.executable.made


def in_place(weight: Tensor) -> None:
    weight.add_(1)


def moved(weight: Tensor) -> None:
    weight.data = weight + 1


CHANGES = pytest.mark.parametrize("change", [in_place, moved])
LIVE = ["prepared"] * WASTED + ["live"]


def test_weights_that_rest_are_prepared_once():
    bench, weights = Bench(True), [torch.ones(3), torch.ones(2)]
    for _ in range(3 * ASK_AGAIN):
        bench(*weights)
    assert (bench.made, bench.report.rebinds) == (["prepared"], 0)


@CHANGES
def test_weights_that_keep_changing_become_inputs_for_good(change: Callable[[Tensor], None]):
    bench, weight = Bench(True), torch.ones(3)
    for _ in range(3 * ASK_AGAIN):
        bench(weight)
        change(weight)
    again = 3 * ASK_AGAIN - len(LIVE) if change is moved else 0
    assert bench.made == LIVE + ["live"] * again
    assert bench.report.rebinds == len(bench.made) - 1
    for _ in range(3):
        bench(weight)
    weight.data = weight * 2
    bench(weight)
    assert set(bench.made[WASTED:]) == {"live"}


@CHANGES
def test_without_another_form_they_are_prepared_at_each_call_until_they_rest(
    change: Callable[[Tensor], None],
):
    bench, weight = Bench(False), torch.ones(3)
    for _ in range(WASTED + 2):
        bench(weight)
        change(weight)
    for _ in range(2 * ASK_AGAIN):
        bench(weight)
    assert bench.made == ["prepared"] * ASK_AGAIN
    change(weight)
    for _ in range(3):
        bench(weight)
    assert len(bench.made) == ASK_AGAIN + 1


@CHANGES
def test_weights_that_are_used_twice_stay_constants(change: Callable[[Tensor], None]):
    bench, weight = Bench(True), torch.ones(3)
    for _ in range(2 * WASTED):
        bench(weight)
        bench(weight)
        change(weight)
    assert bench.made == ["prepared"] * 2 * WASTED


def test_one_instance_that_keeps_changing_costs_the_others_nothing():
    bench, rests, changes = Bench(True), torch.ones(3), torch.ones(3)
    for _ in range(4 * WASTED):
        bench(rests)
        bench(changes)
        changes.add_(1)
    assert bench.made == ["prepared", *LIVE]


@pytest.mark.parametrize("has_live", [True, False])
@pytest.mark.parametrize("count", [MODELS, MODELS + 1, 8 * MODELS])
def test_instances_that_come_back_stay_bound(count: int, has_live: bool):
    sets = [torch.full((3,), float(i)) for i in range(count)]
    bench = Bench(has_live)
    for _ in range(2):
        for weight in sets:
            bench(weight)
    assert len(bench.made) <= 2 * count
    bench.made.clear()
    for _ in range(3):
        for weight in sets:
            bench(weight)
    assert bench.made == []
    assert not any(m.rest for m in bench.binding._models.values())


def test_of_instances_that_are_too_many_to_stay_bound_all_become_live():
    sets = [torch.full((3,), float(i)) for i in range(MOST_MODELS + 2 * MODELS)]
    bench = Bench(True)
    for _ in range(3):
        for weight in sets:
            bench(weight)
    assert bench.made.count("prepared") <= WASTED * (MODELS + 1)
    assert bench.made[-MODELS:] == ["live"] * MODELS
    assert len(bench.binding._evicted) <= MOST_MODELS


def test_evicted_weights_that_die_are_forgotten():
    bench, sets = Bench(True), [torch.full((3,), float(i)) for i in range(MODELS + 1)]
    for weight in sets:
        bench(weight)
    del weight
    assert len(bench.binding._evicted) == 1
    del sets[0]
    assert len(bench.binding._evicted) == 0


def test_dead_weights_are_forgotten():
    bench = Bench(True)
    for _ in range(3):
        bench(torch.ones(3))
    weight = torch.ones(3)
    bench(weight)
    bench(weight)
    assert bench.made == ["prepared"] * 4
    assert len(bench.binding._models) == 1


def test_blocks_that_share_an_executable_are_judged_apart():
    """Blocks with equal graphs do, such as the layers of a model that is split."""
    first, others = Bench(True), [Bench(True) for _ in range(2 * WASTED)]
    weights = torch.arange(3.0 * (len(others) + 1)).view(-1, 3).unbind()
    for other in others:
        other.binding = WeightBinding(first.executable, "probe", other.report)
    for _ in range(3):
        for bench, weight in zip([first, *others], weights, strict=True):
            bench(weight)
    assert first.made == ["prepared"] * len(weights)

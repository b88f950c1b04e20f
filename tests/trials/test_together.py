"""Calls that are tried side by side get the verdicts that they get alone."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.errors import CompileError, LoweringError
from dynamo_backends.verify.trials import merged_trials
from dynamo_backends.verify.trials.call_trials import judge_on_samples
from dynamo_backends.verify.trials.merged_trials import Make, Trial, make_trial, run_merged_trials
from tests.trials.test_trials import fake_call, meta

aten = torch.ops.aten

Call = tuple[Any, tuple[Any, ...]]

CALLS: dict[str, Call] = {
    "exp": (aten.exp.default, (meta(5, 7),)),
    "add": (aten.add.Tensor, (meta(40), meta(40))),
    "sum": (aten.sum.dim_IntList, (meta(3, 20), [1])),
    "relu": (aten.relu.default, (meta(3),)),  # which needs several samples
    "mm": (aten.mm.default, (meta(4, 6), meta(6, 5))),
    "bmm": (aten.bmm.default, (meta(2, 4, 6), meta(2, 6, 5))),
}


def as_it_is(node: fx.Node, tensor: Tensor) -> Tensor:
    return tensor


def trials(*names: str) -> dict[str, Trial]:
    return {n: make_trial(fake_call(CALLS[n][0], *CALLS[n][1]), as_it_is) for n in names}


def eager(graph: Graph, names: Sequence[str] = ()) -> Callable[[list[Any]], list[Any]]:
    return lambda args: list(graph.module(*args))


def spoiled(
    target: Any, spoil: Callable[[Tensor], Tensor]
) -> Callable[[Graph, Sequence[str]], Callable[[list[Any]], list[Any]]]:
    """A vendor that computes one operator otherwise."""

    def make(graph: Graph, names: Sequence[str]) -> Callable[[list[Any]], list[Any]]:
        places = [i for i, node in enumerate(graph.outputs) if node.target is target]

        def run(args: list[Any]) -> list[Any]:
            results = eager(graph)(args)
            return [spoil(x) if i in places else x for i, x in enumerate(results)]

        return run

    return make


def counted(make: Make) -> tuple[list[int], Make]:
    sizes: list[int] = []

    def counting(graph: Graph, names: Sequence[str]) -> Any:
        sizes.append(len(names))
        return make(graph, names)

    return sizes, counting


def test_calls_that_are_right_are_known_after_one_program_of_each_sort() -> None:
    sizes, make = counted(eager)
    assert run_merged_trials(trials(*CALLS), make) == set(CALLS)
    assert sorted(sizes) == [2, 4]  # products apart: they have few samples


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: x * 1.01,
        lambda x: torch.where(x.isnan(), 0.0, x),
        lambda x: x.double(),
        lambda x: x.t().contiguous().t(),
        lambda x: x[:-1],
    ],
)
def test_what_is_wrong_about_one_call_is_of_no_concern_to_others(spoil: Any) -> None:
    make = spoiled(aten.exp.default, spoil)
    assert run_merged_trials(trials("exp", "add", "sum", "relu"), make) == {"add", "sum", "relu"}
    (alone,) = trials("exp").values()
    assert alone.given is not None
    run = make(alone.graph, ())
    assert judge_on_samples(alone.graph, run, alone.given(), "it", str) is not None


def test_a_result_that_is_wrong_on_a_later_sample_is_noticed() -> None:
    turns: list[int] = []

    def spoil(x: Tensor) -> Tensor:
        turns.append(1)
        return x if len(turns) < 3 else x + 1

    assert run_merged_trials(trials("relu", "add"), spoiled(aten.relu.default, spoil)) == {"add"}
    assert len(turns) >= 3


def test_a_call_that_cannot_be_lowered_leaves_the_program() -> None:
    def make(graph: Graph, names: Sequence[str]) -> Any:
        for node in graph.calls:
            if node.target is aten.exp.default:
                raise LoweringError(node.name, str(node.target), "there is no rule")
        return eager(graph)

    sizes, counting = counted(make)
    assert run_merged_trials(trials("exp", "add", "sum", "relu"), counting) == {
        "add",
        "sum",
        "relu",
    }
    assert sizes == [4, 3]


@pytest.mark.parametrize("when", ["compiled", "run"])
def test_a_program_that_fails_is_divided(when: str) -> None:
    def make(graph: Graph, names: Sequence[str]) -> Any:
        fails = any(node.target is aten.exp.default for node in graph.calls)
        if fails and when == "compiled":
            raise CompileError("no kernel")

        def run(args: list[Any]) -> list[Any]:
            if fails:
                raise RuntimeError("the kernel broke down")
            return eager(graph)(args)

        return run

    found = run_merged_trials(trials("exp", "add", "sum", "relu"), make)
    assert "exp" not in found
    assert len(found) >= 2  # what shared the last program with it is tried alone


def test_a_vendor_that_writes_to_an_input_is_wrong() -> None:
    def make(graph: Graph, names: Sequence[str]) -> Any:
        place = next(i for i, p in enumerate(graph.placeholders) if _reader(p) is aten.exp.default)

        def run(args: list[Any]) -> list[Any]:
            results = eager(graph)(args)
            args[place].zero_()
            return results

        return run

    assert run_merged_trials(trials("exp", "add"), make) == {"add"}


def _reader(place: fx.Node) -> Any:
    return next(iter(place.users)).target


def test_large_products_are_compiled_and_not_run() -> None:
    large = {
        str(n): make_trial(fake_call(aten.mm.default, meta(1024, n), meta(n, 1024)), as_it_is)
        for n in (1024, 512)
    }

    def make(graph: Graph, names: Sequence[str]) -> Any:
        return lambda args: pytest.fail("it was run")

    assert run_merged_trials(large, make) == set(large)


def test_programs_are_no_larger_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merged_trials, "TOGETHER", 2)
    sizes, make = counted(eager)
    assert run_merged_trials(trials("exp", "add", "sum", "relu"), make) == {
        "exp",
        "add",
        "sum",
        "relu",
    }
    assert sizes == [2, 2]

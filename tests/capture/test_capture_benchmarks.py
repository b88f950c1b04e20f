"""The programs that measure capture: what they make of a model, and when they fail."""

from dataclasses import asdict

import torch

from dynamo_backends.bench.suites.case import ModelCase
from harness import find_case
from tests.bench.programs import load

coverage = load("benchmarks/coverage.py")


def case(name: str) -> ModelCase:
    return find_case("control_flow", name, "test")


def test_a_model_of_each_kind_in_the_table() -> None:
    with torch.random.fork_rng():
        rows = [
            coverage.measure_case("control_flow", case(n)) for n in ("early_return", "reads_item")
        ]
    whole, broken = rows
    assert whole.cells()[:5] == ("early_return", "control_flow", "4", "4", "100.0%")
    assert broken.cells()[:5] == ("reads_item (breaks)", "control_flow", "8", "8", "87.5%")
    assert (whole.problem, broken.problem) == ("", "")
    table, said = coverage.published({"results": [asdict(row) for row in rows]})
    assert list(table.columns[4].cells) == ["100.0%", "87.5%"]
    assert said.startswith("Of the 2 models, 1 have nothing that breaks a graph")


def test_a_model_that_should_be_whole_and_is_not_is_a_problem() -> None:
    broken = case("reads_item")
    untagged = ModelCase(broken.name, broken.build, broken.example)
    row = coverage.measure_case("control_flow", untagged)
    assert row.problem == "captured whole, and only 87.50% of the operators"

"""Models of the suites through TensorRT: one graph, as accurate as eager.

One of them in every run; all ten classic ones and all transformers by
`python -m pytest tests/trt/test_models.py --full`.
"""

import dataclasses

import pytest
import torch
from torch.utils import _pytree as pytree

from dynamo_backends.bench.suites import Inputs
from harness import ModelCase, check, compile_model, suite
from tests.trt.conftest import Machine

ALWAYS = ("squeezenet1_1",)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    full = metafunc.config.getoption("--full")
    cases = [c for name in ("classic", "transformers") for c in suite(name, "test")]
    chosen = [c for c in cases if full or c.name in ALWAYS]
    metafunc.parametrize("case", chosen, ids=lambda case: case.name)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_one_graph_right_and_without_fallback(machine: Machine, case: ModelCase) -> None:
    model = case.make().to(machine.device)
    with torch.no_grad():
        compiled = compile_model(model, _on(machine, case.inputs()), "tensorrt", fullgraph=True)
        other = dataclasses.replace(case, seed=case.seed + 100).inputs()
        accuracy = check(model, compiled.function, _on(machine, other))
    assert accuracy.passed, accuracy
    (report,) = compiled.reports
    assert report.blocks == 1
    assert report.fallbacks == ()
    assert report.runtime_fallbacks == []
    if machine.log is not None:
        assert len(machine.log.builds) == len(machine.log.refits)
        assert machine.log.runs == 2


def _on(machine: Machine, inputs: Inputs) -> Inputs:
    move = lambda x: x.to(machine.device) if isinstance(x, torch.Tensor) else x  # noqa: E731
    moved: Inputs = pytree.tree_map(move, inputs)
    return moved

"""Models of the suites through TensorRT: one graph, as accurate as eager.

One of them in every run; all ten classic ones and all transformers in turn.
"""

import dataclasses

import pytest
import torch
from torch.utils import _pytree as pytree

from dynamo_backends.bench.suites import Inputs
from harness import ModelCase, check, compile_model, suite
from tests.rotation import long_if
from tests.trt.conftest import Machine

ALWAYS = ("squeezenet1_1",)


CASES = [c for name in ("classic", "transformers") for c in suite(name, "test")]


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("case", [long_if(c.name not in ALWAYS, c, id=c.name) for c in CASES])
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

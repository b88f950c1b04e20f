"""Models under capture: all that the comparison on GPUs has."""

from pathlib import Path

import pytest
import torch

import dynamo_backends
from dynamo_backends.bench.suites import call
from harness import check, find_case
from tests.bench.programs import load
from tests.cudagraphs.conftest import Machine
from tests.rotation import long_if

MODELS = load(str(Path("benchmarks") / "gpu.py")).MODELS
FEW = ("squeezenet1_1",)


@pytest.mark.parametrize(
    ("suite", "name"), [long_if(name not in FEW, s, name, id=name) for s, name in MODELS]
)
def test_a_model_is_one_graph(suite: str, name: str, machine: Machine):
    case = find_case(suite, name, "test")
    with torch.device("cpu"):
        model, inputs = case.make(), case.inputs()
    model = model.to(machine.device)
    inputs = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(machine.device), inputs)
    compiled = torch.compile(model, backend=dynamo_backends.compiler("cudagraphs_eager"))
    with torch.no_grad(), dynamo_backends.record() as reports:
        for _ in range(2):
            call(compiled, inputs)
        for _ in range(2):
            accuracy = check(model, compiled, inputs)
            assert accuracy.passed, accuracy
    (report,) = reports
    assert (report.cuda_graphs, report.uncaptured, report.runtime_fallbacks) == (1, [], [])
    assert report.fallbacks == ()

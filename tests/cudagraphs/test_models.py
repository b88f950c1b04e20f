"""Models under capture: all that the comparison on GPUs has."""

import pytest
import torch

import dynamo_backends
from dynamo_backends.bench.suites import call
from dynamo_backends.bench.suites.case import ModelCase
from dynamo_backends.bench.suites.catalogue import gpu
from harness import check
from tests.cudagraphs.conftest import Machine
from tests.rotation import long_if

FEW = ("squeezenet1_1",)


@pytest.mark.parametrize(
    "case", [long_if(case.name not in FEW, case, id=case.name) for case in gpu("test")]
)
def test_a_model_is_one_graph(case: ModelCase, machine: Machine):
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

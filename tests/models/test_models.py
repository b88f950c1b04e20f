"""Every model of the suites: one graph, nothing in eager, as accurate as eager itself."""

import dataclasses

import pytest
import torch

from dynamo_backends.bench.suites import Inputs
from harness import SUITES, ModelCase, check, compile_model, suite
from tests.rotation import long_if

pytestmark = [
    # Said by torch about code of transformers and about eager's own LSTM; nothing of ours.
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]


# Each has the operators of a smaller model of the suite.
LARGER = ("resnext50_32x4d", "vgg16", "mnasnet1_0")


def cases(*names: str) -> list:
    return [
        long_if(case.name in LARGER, case, id=f"{name}-{case.name}")
        for name in names
        for case in suite(name, "test")
    ]


def other_inputs(case: ModelCase) -> Inputs:
    """Inputs of the same shapes that the model was not compiled with."""
    return dataclasses.replace(case, seed=case.seed + 100).inputs()


@pytest.mark.parametrize("case", cases(*(name for name in SUITES if name != "control_flow")))
def test_one_graph_right_and_without_fallback(case: ModelCase, backend: str) -> None:
    model = case.make()
    with torch.no_grad(), torch._dynamo.config.patch(allow_rnn="rnn" in case.tags):
        compiled = compile_model(model, case.inputs(), backend, fullgraph=True)
        accuracy = check(model, compiled.function, other_inputs(case))
    assert accuracy.passed, accuracy
    assert compiled.graphs == 1
    if backend == "openxla":
        (report,) = compiled.reports
        assert report.kind == "inference"
        assert report.fallbacks == ()
        assert report.runtime_fallbacks == []
        assert (report.verified, report.unverified) == (report.blocks, [])
        assert report.ops_in_eager == 0
        assert report.ops_on_backend > 0


@pytest.mark.parametrize("case", cases("control_flow"))
def test_python_control_flow_gives_eagers_results(case: ModelCase, backend: str) -> None:
    model = case.make()
    with torch.no_grad():
        compiled = compile_model(model, case.inputs(), backend, fullgraph="breaks" not in case.tags)
        for inputs in (case.inputs(), other_inputs(case)):
            accuracy = check(model, compiled.function, inputs)
            assert accuracy.passed, accuracy
    if "breaks" in case.tags:
        assert compiled.graphs > 1
    else:
        assert compiled.graphs == 1
    if backend == "openxla":
        assert len(compiled.reports) == compiled.graphs
        assert sum(report.ops_on_backend for report in compiled.reports) > 0

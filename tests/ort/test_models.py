"""Some models of the suites: one graph, nothing in eager, as accurate as eager itself.

All of them: `DYNAMO_BACKENDS_TEST_BACKEND=onnxrt python -m pytest tests/models`.
"""

import dataclasses

import pytest
import torch

from harness import ModelCase, check, compile_model, find_cases, suite

CLASSIC = ["squeezenet1_1", "alexnet", "vit_s_16", "bert"]
TRANSFORMERS = ["gpt2", "albert", "t5_encoder"]
CASES = [
    *find_cases(suite("classic", "test"), CLASSIC),
    *find_cases(suite("transformers", "test"), TRANSFORMERS),
]


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_graph_right_and_without_fallback(case: ModelCase):
    model = case.make()
    with torch.no_grad():
        compiled = compile_model(model, case.inputs(), "onnxrt", fullgraph=True)
        other = dataclasses.replace(case, seed=case.seed + 100).inputs()
        accuracy = check(model, compiled.function, other)
    assert accuracy.passed, accuracy
    (report,) = compiled.reports
    assert report.blocks == 1
    assert report.fallbacks == ()
    assert report.runtime_fallbacks == []

"""Some models of the suites: one graph, and as accurate as eager itself.

All of them: `DYNAMO_BACKENDS_TEST_BACKEND=ov python -m pytest tests/models`.
"""

import dataclasses
import re

import pytest
import torch

from harness import ModelCase, check, compile_model, find_cases, suite

CLASSIC = ["squeezenet1_1", "alexnet", "vit_s_16", "bert"]
TRANSFORMERS = ["gpt2", "albert", "t5_encoder"]
# A result of floats would differ "by up to" something.
INTEGERS = re.compile(
    r"64-bit integers|differs from eager in \d+ elements|its block has|not an ATen operator"
)
CASES = [
    *find_cases(suite("classic", "test"), CLASSIC),
    *find_cases(suite("transformers", "test"), TRANSFORMERS),
]


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_graph_right_and_integers_alone_in_eager(case: ModelCase):
    model = case.make()
    with torch.no_grad():
        compiled = compile_model(model, case.inputs(), "ov", fullgraph=True)
        other = dataclasses.replace(case, seed=case.seed + 100).inputs()
        accuracy = check(model, compiled.function, other)
    assert accuracy.passed, accuracy
    (report,) = compiled.reports
    assert report.runtime_fallbacks == []
    assert report.reverted == ""
    # Positions and masks that are computed in 64-bit integers, and what is left alone beside them.
    assert all(INTEGERS.search(f.reason) for f in report.fallbacks), report.fallbacks
    assert report.ops_in_eager < 0.3 * report.ops_on_backend, report.fallbacks

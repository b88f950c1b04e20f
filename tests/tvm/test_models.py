"""Some models of the suites: one graph, nothing in eager, as accurate as eager itself.

All of them: `DYNAMO_BACKENDS_TEST_BACKEND=tvm python -m pytest tests/models`.
"""

import pytest

from tests.backend_checks import model_is_right

MODELS = [("classic", "squeezenet1_1"), ("classic", "bert")]


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize(("suite", "name"), MODELS, ids=lambda value: value)
def test_one_graph_right_and_without_fallback(suite: str, name: str):
    report = model_is_right("tvm", suite, name)
    assert report.blocks == 1
    assert report.fallbacks == ()

"""Some models of the suites: one graph, and as accurate as eager itself.

All of them: `DYNAMO_BACKENDS_TEST_BACKEND=iree python -m pytest tests/models`.
"""

import pytest

from tests import backend_checks as checks


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize(
    ("suite", "name"),
    [
        ("classic", "alexnet"),
        pytest.param("transformers", "distilbert", marks=pytest.mark.long),
    ],
)
def test_a_model(suite: str, name: str):
    report = checks.model_is_right("iree", suite, name)
    assert report.ops_in_eager < 0.1 * report.ops_on_backend, report.fallbacks
    assert report.reverted == ""

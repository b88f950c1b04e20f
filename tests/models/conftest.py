import os

import pytest


@pytest.fixture(scope="session")
def backend() -> str:
    """The backend under test; another one can be named to see whether a failure is its own."""
    return os.environ.get("DYNAMO_BACKENDS_TEST_BACKEND", "openxla")

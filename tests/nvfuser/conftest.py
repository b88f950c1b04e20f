"""Which nvFuser the tests run on: the real one on a GPU where both are there, else the double."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from dynamo_backends.nvfuser import vendor
from tests.nvfuser import double


def is_real() -> bool:
    """Whether nvFuser itself is tested here."""
    found = any(importlib.util.find_spec(name) is not None for name in vendor.FRONTENDS)
    return found and torch.cuda.is_available()


@pytest.fixture(params=vendor.FRONTENDS)
def frontend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of the frontend in use. Tensors are made where it computes."""
    if not is_real():
        with double.installed(request.param):
            yield request.param
        return
    if request.param not in vendor.installed():
        pytest.skip(f"{request.param} is not installed, or the other frontend is loaded")
    torch.set_default_device("cuda")
    try:
        yield request.param
    finally:
        torch.set_default_device(None)


@pytest.fixture
def preferred(request: pytest.FixtureRequest) -> Iterator[str]:
    """As `frontend`, for tests that need only one: the one that is preferred."""
    if is_real():
        torch.set_default_device("cuda")
        try:
            yield vendor.installed()[0]
        finally:
            torch.set_default_device(None)
        return
    with double.installed(vendor.FRONTENDS[0]):
        yield vendor.FRONTENDS[0]

"""Which nvFuser the tests run on: the real one on a GPU where both are there, else the double."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from dynamo_backends.nvfuser import vendor
from tests.nvfuser import double


def is_real() -> bool:
    """Whether nvFuser itself is tested here."""
    return importlib.util.find_spec(vendor.MODULE) is not None and torch.cuda.is_available()


@pytest.fixture
def nvfuser() -> Iterator[str]:
    """The name of nvFuser's module. Tensors are made where it computes."""
    if not is_real():
        with double.installed():
            yield vendor.MODULE
        return
    torch.set_default_device("cuda")
    try:
        yield vendor.MODULE
    finally:
        torch.set_default_device(None)

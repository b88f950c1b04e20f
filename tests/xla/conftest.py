"""A device that shares no memory with torch, for tests of what lives there."""

from collections.abc import Iterator

import pytest
import torch

from tests.doubles.remote import RemoteDouble, remote_double


@pytest.fixture
def device() -> Iterator[RemoteDouble]:
    """The double; what tests compile is forgotten afterwards."""
    torch.manual_seed(7)
    yield remote_double()
    torch._dynamo.reset()

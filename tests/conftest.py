"""Fixtures for all tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="run the whole operator database and rewrite its table in docs/",
    )


@pytest.fixture(autouse=True)
def _fresh_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test starts with seeded random numbers, no compiled code and an empty disk cache."""
    monkeypatch.setenv("DYNAMO_BACKENDS_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()

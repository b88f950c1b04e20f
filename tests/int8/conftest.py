"""Backends in int8 that are registered for a test, and races that they win if they are right."""

from collections.abc import Iterator

import pytest

from dynamo_backends.interface import registry
from dynamo_backends.workers.race import Race, Run
from tests.int8.planted import FAULTS, FIRST, Planted, planted


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`planted_int8`, and one backend for each fault."""
    kinds = [Planted, *map(planted, (*FAULTS, FIRST))]
    made = {kind.name: kind() for kind in kinds}
    for name, backend in made.items():
        monkeypatch.setitem(registry._registered, name, lambda backend=backend: backend)
    registry.get_backend.cache_clear()
    yield
    registry.get_backend.cache_clear()


@pytest.fixture
def int8_seems_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any candidate in int8 that is right is chosen: the others seem a hundred times slower."""
    original = Race._sample

    def biased(self: Race, run: Run, repeat: int) -> float:
        (name,) = (name for name, known in self._runs.items() if known is run)
        return original(self, run, repeat) * (1 if "@int8" in name else 1e4)

    monkeypatch.setattr(Race, "_sample", biased)

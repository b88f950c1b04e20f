"""Races among kernels whose outcome is planted."""

from collections.abc import Callable
from typing import Any

import pytest

from dynamo_backends.kernels import timing as measured
from dynamo_backends.workers.contention import Contention
from dynamo_backends.workers.kernel_choices import Choices
from dynamo_backends.workers.race import RaceResult

QUIET = Contention()
BUSY = Contention(of_others=1.0, preempted=0.9)


class Memory(dict[str, Any]):
    """A place for choices that ends with the test."""

    def put(self, key: str, parts: Any) -> bool:
        """Keeps them."""
        self[key] = parts
        return True


def outcome(winner: str, *others: str, contention: Contention = QUIET, clear: bool = True):
    """What a race ends with that one candidate wins, and others lose."""
    return RaceResult({}, (winner, *others), frozenset(), {}, {}, contention, clear)


def plant(monkeypatch: pytest.MonkeyPatch, race: Callable[..., str]) -> None:
    """Lets a function of the preferred way, all ways and layouts name the winner of each race."""
    monkeypatch.setattr(measured, "choices", Choices(Memory, lambda: ""))
    monkeypatch.setattr(measured, "_race", lambda *given: outcome(race(*given)))


def always(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Lets one way win each race."""
    plant(monkeypatch, lambda *_: way)

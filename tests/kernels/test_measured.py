"""Choices among kernels: what they depend on, and where they are kept."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from dynamo_backends.kernels import timing as measured
from dynamo_backends.kernels.timing import fastest
from dynamo_backends.runtime.cache import cache_folder
from dynamo_backends.workers.kernel_choices import Choices
from dynamo_backends.workers.race import RaceResult
from tests.kernels.planted import BUSY, outcome


@pytest.fixture
def races(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was raced; "fast" always wins, and choices are those of a new process."""
    found: list[Any] = []

    def race(preferred: str, runs: Any, layouts: Any) -> Any:
        found.append((preferred, sorted(runs), [shape for shape, *_ in layouts]))
        return outcome("fast", "usual")

    monkeypatch.setattr(measured, "_race", race)
    begin_a_process(monkeypatch)
    return found


def begin_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "choices", Choices(measured._store, measured._holds_for))


def ask(rows: int = 4, kind: str = "layer", columns: int = 8, **more: Any) -> str:
    def ways() -> dict[str, Any]:
        return {"usual": lambda x: x, "fast": lambda x: x}

    layout = ((rows, columns), (columns, 1), torch.float32)
    return fastest(kind, "usual", ways, [layout], **more)


def test_a_class_of_shapes_is_raced_once(races: list[Any]):
    assert {ask(rows) for rows in (5, 6, 7, 8)} == {"fast"}
    assert races == [("usual", ["fast", "usual"], [(5, 8)])]
    ask(4)
    ask(9)
    ask(columns=16)
    ask(kind="another layer")
    assert [shapes for *_, shapes in races[1:]] == [[(4, 8)], [(9, 8)], [(4, 16)], [(4, 8)]]


def test_the_order_in_memory_is_part_of_the_class(races: list[Any]):
    for strides in ((8, 1), (1, 4)):
        fastest("layer", "usual", dict, [((4, 8), strides, torch.float32)])
    assert len(races) == 2


def test_a_second_process_finds_the_choice_on_disk(
    races: list[Any], monkeypatch: pytest.MonkeyPatch
):
    ask()
    assert list((cache_folder() / measured.FOLDER).glob("*.bin"))
    begin_a_process(monkeypatch)
    assert ask() == "fast"
    assert len(races) == 1
    begin_a_process(monkeypatch)
    monkeypatch.setattr(measured, "cpu_name", lambda: "another one")
    ask()
    assert len(races) == 2


def test_the_safe_way_is_taken_where_a_race_is_disturbed(monkeypatch: pytest.MonkeyPatch):
    begin_a_process(monkeypatch)
    disturbed = outcome("fast", contention=BUSY, clear=False)
    monkeypatch.setattr(measured, "_race", lambda *_: disturbed)
    assert ask(safe="safe") == "safe"
    assert ask(kind="another layer", preferred="preferred") == "preferred"
    assert not (cache_folder() / measured.FOLDER).exists()


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def in_turn(monkeypatch: pytest.MonkeyPatch, *outcomes: RaceResult) -> list[int]:
    """Races that end as planted, one after the other; gives on how many threads each was."""
    threads: list[int] = []
    left = list(outcomes)

    def race(*_: Any) -> RaceResult:
        threads.append(torch.get_num_threads())
        return left.pop(0)

    monkeypatch.setattr(measured, "_race_on_threads", race)
    begin_a_process(monkeypatch)
    return threads


@pytest.mark.usefixtures("two_threads")
def test_who_is_disturbed_races_on_one_thread(monkeypatch: pytest.MonkeyPatch):
    disturbed = outcome("slow", "fast", contention=BUSY, clear=False)
    uneven = outcome("slow", "fast", contention=replace(BUSY, scattered=0.6))
    for first in (disturbed, uneven):
        threads = in_turn(monkeypatch, first, outcome("fast", "slow", clear=False))
        assert ask(safe="safe") == "fast"
        assert threads == [2, 1]
        assert torch.get_num_threads() == 2
    assert not (cache_folder() / measured.FOLDER).exists(), "what one thread says is not kept"


@pytest.mark.usefixtures("two_threads")
def test_one_thread_that_is_disturbed_decides_nothing(monkeypatch: pytest.MonkeyPatch):
    disturbed = outcome("slow", "fast", contention=BUSY, clear=False)
    in_turn(monkeypatch, disturbed, disturbed)
    assert ask(safe="safe") == "safe"


@pytest.mark.usefixtures("two_threads")
def test_who_is_not_disturbed_races_once(monkeypatch: pytest.MonkeyPatch):
    for found in (outcome("fast"), outcome("fast", contention=BUSY)):
        threads = in_turn(monkeypatch, found)
        assert ask(safe="safe", kind=str(found.contention)) == "fast"
        assert threads == [2]


def test_what_is_deterministic_is_not_raced(races: list[Any]):
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert ask() == "usual"
    finally:
        torch.use_deterministic_algorithms(before)
    assert races == []

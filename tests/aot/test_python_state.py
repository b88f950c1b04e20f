"""The shadow of CPython's stack, alone: which objects each instruction works on.

Runs on the interpreter at hand; its rules are those of 3.11 to 3.13.
"""

import gc
from types import FrameType
from typing import Any

import pytest

from dynamo_backends.aot.step.python_state.bytecode import UNKNOWN, Method, Observer, look_up
from dynamo_backends.aot.step.python_state.frames import FollowedFrames
from dynamo_backends.aot.step.python_state.places import (
    MISSING,
    ContentsGuard,
    Place,
    PlaceGuard,
    items_of,
)


class Recorded(Observer):
    """Writes down what it is told, with the kinds of the objects."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []

    def load_global(self, frame: FrameType, name: str) -> Any:
        self.log.append(("global", name))
        return frame.f_globals[name]

    def load_cell(self, frame: FrameType, name: str) -> Any:
        self.log.append(("cell", name))
        return frame.f_locals.get(name, UNKNOWN)

    def load_attribute(self, frame: FrameType, owner: Any, name: str) -> Any:
        self.log.append(("attribute", _kind(owner), name))
        return UNKNOWN if owner is UNKNOWN else look_up(owner, name)

    def load_item(self, frame: FrameType, container: Any, key: Any) -> Any:
        self.log.append(("item", _kind(container), key))
        return container[key] if isinstance(container, list | dict) else UNKNOWN

    def contents(self, frame: FrameType, container: Any) -> None:
        if isinstance(container, list | dict):
            self.log.append(("contents", _kind(container)))

    def store_attribute(self, frame: FrameType, owner: Any, name: str) -> None:
        self.log.append(("set attribute", _kind(owner), name))

    def store_item(self, frame: FrameType, container: Any, key: Any) -> None:
        self.log.append(("set item", _kind(container), key))

    def store_global(self, frame: FrameType, name: str) -> None:
        self.log.append(("set global", name))

    def store_cell(self, frame: FrameType, name: str) -> None:
        self.log.append(("set cell", name))

    def call(self, frame: FrameType, function: Any, args: list[Any]) -> Any:
        name = function.name if isinstance(function, Method) else getattr(function, "__name__", "?")
        self.log.append(("call", name, *map(_kind, args)))
        return UNKNOWN


def _kind(value: Any) -> str:
    return "?" if value is UNKNOWN else type(value).__name__


class Inner:
    def __init__(self) -> None:
        self.z = 7


class Config:
    k = 3

    def __init__(self) -> None:
        self.w, self.n, self.items, self.table, self.inner = 0.5, 0, [1], {"a": 1}, Inner()

    @property
    def twice(self) -> float:
        return self.w * 2

    def get(self) -> Inner:
        return self.inner


config = Config()
several = [Inner(), Inner()]
SCALE = 1.5


def followed(function: Any, *args: Any) -> list[tuple[Any, ...]]:
    """What an observer is told while a function runs."""
    observer = Recorded()

    def ignore(frame: FrameType, callee: Any) -> None:
        pass

    with FollowedFrames(observer, lambda file: file == __file__, ignore) as frames:
        function(*args)
    assert frames.error is None
    return observer.log


def _attributes() -> Any:
    return config.w + config.k + config.inner.z


def _results() -> Any:
    return config.get().z + (lambda c: c.w)(config) + config.twice


def _stores() -> None:
    global SCALE
    SCALE *= 1
    config.n += 1
    config.table["b"] = config.table["a"]
    config.items.append(2)


def _loops() -> Any:
    total = sum([each.z for each in several])
    for each in several:
        total += each.z
    first, second = config, config.inner
    return total + (second.z if config.items else first.w)


def _handlers() -> Any:
    try:
        [][1]
    except IndexError:
        with open("/dev/null") as file:
            return config.inner.z, file.name, f"{config.w:.2f}"


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (_attributes, [("attribute", "Config", "w"), ("attribute", "Config", "k"),
                       ("attribute", "Inner", "z")]),
        (_results, [("attribute", "Inner", "z"), ("attribute", "Config", "w"),
                    ("attribute", "Config", "twice"), ("call", "get")]),
        (_stores, [("set global", "SCALE"), ("set attribute", "Config", "n"),
                   ("set item", "dict", "b"), ("item", "dict", "a"), ("call", "append", "int")]),
        (_loops, [("attribute", "Inner", "z"), ("contents", "list"),
                  ("attribute", "Config", "items")]),
        (_handlers, [("attribute", "Inner", "z"), ("attribute", "Config", "w")]),
    ],
)  # fmt: skip
def test_operands_are_known(function: Any, expected: list[tuple[Any, ...]]) -> None:
    log = followed(function)
    for each in expected:
        assert each in log, f"{each} is not in {log}"
    assert not [x for x in log if x[:2] == ("attribute", "?")]


def test_variables_of_closures() -> None:
    count = 0

    def function() -> None:
        nonlocal count
        count += 1

    assert followed(function) == [("cell", "count"), ("set cell", "count")]


def test_what_runs_while_garbage_is_collected_is_not_followed() -> None:
    def collecting(phase: str, info: dict[str, int]) -> None:
        assert config.w

    gc.callbacks.append(collecting)
    try:
        log = followed(gc.collect)
        assert ("attribute", "Config", "w") not in log
        assert ("attribute", "Config", "w") in followed(lambda: collecting("", {}) or config.w)
    finally:
        gc.callbacks.remove(collecting)


def test_errors_of_the_observer_do_not_reach_user_code() -> None:
    class Broken(Recorded):
        def load_attribute(self, frame: FrameType, owner: Any, name: str) -> Any:
            raise ValueError("broken")

    frames = FollowedFrames(Broken(), lambda file: file == __file__, lambda frame, callee: None)
    with frames:
        assert _attributes() == config.w + config.k + config.inner.z
    assert isinstance(frames.error, ValueError)


def test_places_tell_equal_values_from_others() -> None:
    table: dict[str, Any] = {"a": 1, "b": 2.5, "c": "x"}
    places = [Place(table, key, key, "") for key in ("a", "b", "c", "d")]
    guard = PlaceGuard(places, [place.get() for place in places])
    assert places[3].get() is MISSING
    assert guard.changed() == []
    table["b"] = float("2.5")  # equal, another object
    assert guard.changed() == []
    table["a"] = True  # equal, of another type
    assert [place.name for place in guard.changed()] == ["a"]
    table["a"], table["d"] = 1, 0
    assert [place.name for place in guard.changed()] == ["d"]


@pytest.mark.parametrize("container", [[1, 2], {"a": 1}, {1, 2}])
def test_contents_tell_what_was_added(container: Any) -> None:
    guard = ContentsGuard(container, items_of(container), Place(container, None, "it", ""))
    assert guard.holds()
    container.update({"b": 2} if isinstance(container, dict) else {3}) if not isinstance(
        container, list
    ) else container.append(3)
    assert not guard.holds()

"""What is asked of CUDA itself: in which order, and what is put right after a failure."""

import contextlib
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dynamo_backends.cudagraphs.device import Cuda


class Graph:
    """Stands for `torch.cuda.CUDAGraph`; ending a broken capture raises, as CUDA's does."""

    def __init__(self, log: list[Any], breaks: bool = False):
        self._log, self._breaks = log, breaks

    def capture_begin(self, **how: Any) -> None:
        inspect.signature(torch.cuda.CUDAGraph.capture_begin).bind(self, **how)
        self._log.append(("begin", how))

    def capture_end(self) -> None:
        self._log.append("end")
        if self._breaks:
            raise RuntimeError("operation failed due to a previous error during capture")


class Generator:
    """Stands for torch's generator of a device."""

    def __init__(self, log: list[Any]):
        self._log = log

    def clone_state(self) -> str:
        return "clone"

    def graphsafe_set_state(self, state: str) -> None:
        self._log.append(("generator", state))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was called, with torch.cuda replaced by what writes it down."""
    found: list[Any] = []

    @contextlib.contextmanager
    def stream(_: Any) -> Iterator[None]:
        found.append("enter stream")
        try:
            yield
        finally:
            found.append("leave stream")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: found.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: found.append("empty cache"))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "default_generators", (Generator(found),))
    return found


STREAM = SimpleNamespace(device=torch.device("cuda", 0))
BEGIN = ("begin", {"pool": (0, 1), "capture_error_mode": "thread_local"})


def test_a_capture(log: list[Any]):
    with Cuda().capture(Graph(log), (0, 1), STREAM):
        log.append("work")
    expected = ["synchronize", "empty cache", "enter stream", BEGIN, "work", "end", "leave stream"]
    assert log == expected


def test_what_cannot_be_recorded_leaves_nothing_behind(log: list[Any]):
    with (
        pytest.raises(ValueError, match="waits"),
        Cuda().capture(Graph(log, breaks=True), (0, 1), STREAM),
    ):
        raise ValueError("it waits")
    assert log[3:] == [BEGIN, "end", ("generator", "clone"), "leave stream"]


def test_a_capture_that_turns_out_broken_at_its_end(log: list[Any]):
    with (
        pytest.raises(RuntimeError, match="previous error during capture"),
        Cuda().capture(Graph(log, breaks=True), (0, 1), STREAM),
    ):
        log.append("work")
    assert log[3:] == [BEGIN, "work", "end", "end", ("generator", "clone"), "leave stream"]


def test_streams_are_made_once(monkeypatch: pytest.MonkeyPatch):
    waited: list[Any] = []

    class External:
        def __init__(self, handle: int, device: int):
            self.handle, self.device = handle, device

        def wait_stream(self, other: Any) -> None:
            waited.append((self, other))

    monkeypatch.setattr(torch.cuda, "Stream", lambda index: object())
    monkeypatch.setattr(torch.cuda, "ExternalStream", External)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: f"current {index}")
    cuda = Cuda()
    assert cuda.side_stream(0) is cuda.side_stream(0)
    assert cuda.side_stream(0) is not cuda.side_stream(1)
    for handle, index in ((7, 0), (7, 0), (7, 1)):
        cuda.wait_outside(handle, index)
    assert waited[0][0] is waited[1][0]
    assert [(s.handle, s.device, other) for s, other in waited[1:]] == [
        (7, 0, "current 0"), (7, 1, "current 1")]  # fmt: skip


@pytest.mark.parametrize(
    ("built", "sees", "reason"),
    [
        (None, False, "is built without CUDA"),
        ("13.0", False, "torch sees no CUDA device"),
        ("13.0", True, None),
    ],
)
def test_why_nothing_can_be_captured(
    monkeypatch: pytest.MonkeyPatch, built: str | None, sees: bool, reason: str | None
):
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees)
    found = Cuda().why_not()
    assert found is None if reason is None else reason in str(found)

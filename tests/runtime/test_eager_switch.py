"""The way back to eager (tests/test_containment.py has what leads there)."""

import logging
import threading
from typing import Any

import pytest

from dynamo_backends import FallbackRefusedError, GraphReport, VerificationError
from dynamo_backends.interface.report import EagerEvent
from dynamo_backends.runtime.eager_switch import EagerSwitch

BROKEN = RuntimeError("the vendor's library broke")
REASON = "RuntimeError: the vendor's library broke"


def switch(**settings: Any) -> tuple[EagerSwitch, GraphReport]:
    """Back to doubling a number, for a block of a backend."""
    report = GraphReport("vendor", "inference", 2)
    return EagerSwitch(lambda x: 2 * x, [report], "block", **settings), report


def test_what_raised_is_noted_once_with_its_kind(caplog: pytest.LogCaptureFixture):
    back, report = switch()
    with caplog.at_level(logging.WARNING, "dynamo_backends"):
        assert [
            back.run_eager_instead(BROKEN, 3),
            back.run_eager_instead(ValueError("later"), 4),
        ] == [6, 8]
    assert report.events == [EagerEvent("failed", "block", REASON)]
    assert report.runtime_fallbacks == report.to_dict()["runtime_fallbacks"] == [REASON]
    assert [r.getMessage() for r in caplog.records] == [
        f"a compiled block of vendor failed ({REASON}); the block runs in eager from now on"
    ]


@pytest.mark.plants_errors
def test_what_is_wrong_is_noted_with_its_kind():
    back, report = switch()
    back.switch_after_mismatch("output 0 is 3 instead of 4")
    text = (
        "vendor computed a wrong result in the inference graph of capture 2: "
        "output 0 is 3 instead of 4"
    )
    assert report.events == [EagerEvent("wrong", "block", text)]


def test_what_cannot_be_compiled_is_noted_as_reverted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("DYNAMO_BACKENDS_CHECK")
    back, report = switch()
    back.switch_uncompiled(BROKEN, "compiling")
    assert report.reverted == f"compiling failed ({REASON}); the block runs in eager instead"
    assert report.events == []


def test_threads_that_find_the_same_say_so_once():
    calls: list[int] = []
    back, report = switch(on_switch=lambda: calls.append(1))
    barrier = threading.Barrier(4)

    def fail() -> None:
        barrier.wait()
        back.run_eager_instead(BROKEN, 1)

    threads = [threading.Thread(target=fail) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(report.events), calls) == (1, [1])


def test_where_eager_may_not_take_over_an_error_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("DYNAMO_BACKENDS_CHECK")
    back, report = switch(allowed=False)
    refused = r'With fallback="eager" it would run in eager\.'
    with pytest.raises(FallbackRefusedError, match=refused) as info:
        back.run_eager_instead(BROKEN, 1)
    assert info.value.__cause__ is BROKEN
    with pytest.raises(FallbackRefusedError, match=refused):
        back.switch_uncompiled(BROKEN, "compiling")
    with pytest.raises(VerificationError, match="output 0 differs, and more is said"):
        back.switch_after_mismatch("output 0 differs", ", and more is said")
    assert (report.events, report.reverted) == ([], "")


def test_neither_too_little_memory_nor_a_users_mistake_costs_the_compiled_code():
    back, report = switch()
    with pytest.raises(MemoryError):
        back.run_eager_instead(MemoryError(), 1)
    with pytest.raises(TypeError, match="unsupported operand"):
        back.run_eager_instead(BROKEN, None)
    assert report.events == []

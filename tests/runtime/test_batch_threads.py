import os
import threading

import pytest

from dynamo_backends.runtime.cpu_info import use_batch_scheduling

pytestmark = pytest.mark.skipif(
    not hasattr(os, "SCHED_BATCH"), reason="only Linux has a policy for batches"
)


def policy_of_a_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    return found[0]


def test_only_threads_that_are_started_inside_are_of_a_batch():
    assert policy_of_a_new_thread() == os.SCHED_OTHER
    with use_batch_scheduling():
        assert policy_of_a_new_thread() == os.SCHED_BATCH
    assert policy_of_a_new_thread() == os.SCHED_OTHER


def test_an_error_inside_leaves_the_policy_as_it_was():
    with pytest.raises(ValueError, match="inside"), use_batch_scheduling():
        raise ValueError("inside")
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_without_permission_nothing_changes(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with use_batch_scheduling():
        assert policy_of_a_new_thread() == os.SCHED_OTHER


def test_another_policy_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getscheduler", lambda _: os.SCHED_RR)
    changed: list[int] = []
    monkeypatch.setattr(os, "sched_setscheduler", lambda _, policy, __: changed.append(policy))
    with use_batch_scheduling():
        assert not changed
    assert not changed

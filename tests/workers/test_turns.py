"""Calls and a process that works beside them take turns."""

import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dynamo_backends.workers import stopped_time, worker_process
from dynamo_backends.workers import turns as module
from dynamo_backends.workers.stopped_time import StoppedTime
from dynamo_backends.workers.turns import ProcessPauser
from dynamo_backends.workers.worker_process import ProcessLostError, WorkerProcess

STOP, GO_ON = signal.SIGSTOP, signal.SIGCONT


class Planned:
    """Turns by a clock that is set by hand; signals are noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, processors: int = 1) -> None:
        monkeypatch.setattr(module, "processors", lambda: processors)
        self.now = 0.0
        self.sent: list[tuple[int, int]] = []
        self.stopped = StoppedTime()
        self.turns = ProcessPauser(lambda *sent: self.sent.append(sent), lambda: self.now)
        self.turns.add(7, self.stopped)

    def call(self, seconds: float, pause: float = 0.0, caller: int = 1) -> list[int]:
        """A call after a pause; what was sent in it."""
        before = len(self.sent)
        self.now += pause
        self.turns.begins(caller)
        self.now += seconds
        self.turns.ends(caller)
        return [number for _, number in self.sent[before:]]


def test_a_process_is_stopped_in_calls_and_goes_on_in_pauses(monkeypatch: pytest.MonkeyPatch):
    planned = Planned(monkeypatch)
    assert planned.call(0.1, pause=0.1) == [], "nothing is known of calls yet"
    for number in range(1, 4):
        assert planned.call(0.1, pause=0.1) == [STOP, GO_ON]
        assert planned.stopped.seconds == pytest.approx(0.1 * number)
    assert {group for group, _ in planned.sent} == {7}


def test_who_waits_goes_on_when_the_last_call_ends():
    turns = ProcessPauser()
    turns.wait(60)  # nobody is calling
    gone_on = threading.Event()
    turns.begins(1)
    turns.begins(2)
    waiting = threading.Thread(target=lambda: (turns.wait(60), gone_on.set()), daemon=True)
    waiting.start()
    turns.ends(1)
    assert not gone_on.wait(0.05)
    turns.ends(2)
    assert gone_on.wait(30)


def test_calls_without_pauses_stop_nobody_after_a_while(monkeypatch: pytest.MonkeyPatch):
    planned = Planned(monkeypatch)
    planned.call(0.1, pause=1.0)
    sent = [bool(planned.call(0.1)) for _ in range(60)]
    assert sent[0]
    assert not any(sent[-20:])
    assert planned.call(0.1, pause=0.1) == [STOP, GO_ON]


def test_short_calls_are_not_worth_signals(monkeypatch: pytest.MonkeyPatch):
    planned = Planned(monkeypatch)
    assert not any(planned.call(1e-4, pause=1e-3) for _ in range(50))


def test_calls_of_several_threads_are_one(monkeypatch: pytest.MonkeyPatch):
    planned = Planned(monkeypatch)
    planned.call(0.1, pause=0.1)
    planned.now += 0.1
    planned.turns.begins(1)
    planned.turns.begins(2)
    planned.turns.ends(1)
    assert [number for _, number in planned.sent] == [STOP]
    planned.now += 0.3
    assert planned.turns.stopped_s(7) == pytest.approx(0.3)
    planned.turns.ends(2)
    planned.turns.ends(2)  # a backward pass that failed had been left
    assert [number for _, number in planned.sent] == [STOP, GO_ON]
    assert planned.turns.stopped_s(7) == planned.stopped.seconds == pytest.approx(0.3)


def test_a_process_that_comes_in_a_call_was_not_stopped(monkeypatch: pytest.MonkeyPatch):
    planned, late = Planned(monkeypatch), StoppedTime()
    planned.call(0.1, pause=0.1)
    planned.now += 0.1
    planned.turns.begins(1)
    planned.turns.add(8, late)
    planned.now += 0.1
    planned.turns.ends(1)
    assert {group for group, _ in planned.sent} == {7}
    assert late.seconds == 0
    planned.turns.discard(7)
    assert planned.call(0.1, pause=0.1) == [STOP, GO_ON]
    assert planned.sent[-1] == (8, GO_ON)


def test_who_has_done_its_work_in_a_call_goes_on(monkeypatch: pytest.MonkeyPatch):
    planned = Planned(monkeypatch)
    planned.call(0.1, pause=0.1)
    planned.now += 0.1
    planned.turns.begins(1)
    planned.now += 0.1
    planned.turns.discard(7)
    assert planned.sent == [(7, STOP), (7, GO_ON)]
    assert planned.stopped.seconds == pytest.approx(0.1)
    planned.turns.ends(1)
    assert planned.call(0.1, pause=0.1) == [], "it has nothing to do"


def test_a_process_is_not_stopped_for_long(monkeypatch: pytest.MonkeyPatch):
    """It may hold a lock that the call waits for."""
    planned = Planned(monkeypatch)
    planned.call(0.1, pause=0.1)
    planned.now += 0.1
    planned.turns.begins(1)
    planned.now += 1.9
    planned.turns.release(7)
    assert planned.sent[-1] == (7, STOP)
    planned.now += 0.2
    planned.turns.release(7)
    assert planned.sent[-1] == (7, GO_ON)
    sent = len(planned.sent)
    planned.now += 60
    planned.turns.release(7)
    planned.turns.ends(1)
    assert len(planned.sent) == sent
    assert planned.stopped.seconds == pytest.approx(2.1)
    assert planned.call(0.1, pause=60.0) == [STOP, GO_ON], "the next call stops it again"


@pytest.mark.skipif(sys.platform != "linux", reason="signals stop processes of Linux")
def test_a_call_that_waits_for_the_process_ends(taken: ProcessPauser):
    with Working() as process:
        process.ask({"seconds": 0.0}, 60)
        answers: list[float] = []
        work = threading.Thread(
            target=lambda: answers.append(process.ask({"seconds": 0.5}, 60)["took"])
        )
        for _ in range(3):  # so that there are calls, and pauses between them
            taken.begins(1)
            time.sleep(0.02)
            taken.ends(1)
            time.sleep(0.02)
        work.start()
        while not taken.are_taken:
            time.sleep(0.001)
        taken.begins(1)
        assert taken._stopped
        work.join(60)  # inside of the call
        assert not work.is_alive()
        taken.ends(1)
    assert answers


def test_with_room_for_both_nobody_is_stopped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    planned = Planned(monkeypatch, processors=5)
    planned.call(0.1, pause=0.1)
    assert planned.call(0.1, pause=0.1) == []
    planned.turns.begins(1)
    planned.now += 0.1
    assert planned.sent == []
    assert planned.call(0.1, caller=2) == [STOP], "two calls and the process need six processors"
    planned.now += 0.1
    planned.turns.ends(1)
    assert planned.sent[-1] == (7, GO_ON)
    assert planned.stopped.seconds == pytest.approx(0.2)


CHILD = textwrap.dedent("""
    import time
    from dynamo_backends.workers.worker_process import serve
    from dynamo_backends.workers.stopped_time import running_s

    def answer(request, say):
        start, running = time.perf_counter(), running_s()
        while running_s() - running < request["seconds"]:
            pass
        return {"took": time.perf_counter() - start}

    serve(answer)
""")


class Working(WorkerProcess):
    def __init__(self, *more: str, niceness: int = 1) -> None:
        super().__init__(("-c", CHILD, *more), niceness=niceness)


@pytest.mark.parametrize("niceness", [0, 1])
def test_a_process_may_have_arguments_of_its_own(niceness: int):
    with Working("--folder", "caches", niceness=niceness) as process:
        assert process.ask({"seconds": 0.0}, 60)["took"] >= 0


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> ProcessPauser:
    """Turns of this test, on a machine without room for both."""
    monkeypatch.setattr(module, "processors", lambda: 1)
    made = ProcessPauser()
    monkeypatch.setattr(worker_process, "turns", made)
    return made


def calling(turns: ProcessPauser, until: Callable[[], bool]) -> None:
    """Calls of 90 ms with pauses of 10."""
    while not until():
        turns.begins(1)
        time.sleep(0.09)
        turns.ends(1)
        time.sleep(0.01)


def test_a_process_without_a_request_is_left_alone(taken: ProcessPauser):
    asked: list[bool] = []
    with Working() as process:
        hearing = threading.Thread(target=lambda: process.ask({"seconds": 0.3}, 60))
        hearing.start()
        deadline = time.perf_counter() + 60
        while not taken.are_taken and time.perf_counter() < deadline:
            time.sleep(0.001)
        asked.append(taken.are_taken)
        hearing.join()
        asked.append(taken.are_taken)
    assert asked == [True, False]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells whether a process is stopped")
def test_a_real_process_is_stopped_and_knows_for_how_long(taken: ProcessPauser):
    with Working() as process:
        process.ask({"seconds": 0.0}, 60)
        assert process._child is not None
        status = Path(f"/proc/{process._child.pid}/stat")
        answers: list[float] = []
        work = threading.Thread(
            target=lambda: answers.append(process.ask({"seconds": 0.2}, 60)["took"])
        )
        work.start()
        calling(taken, lambda: bool(answers))
        work.join()
        assert answers[0] > 0.4, "most of the time it was stopped"
        work = threading.Thread(target=process.ask, args=({"seconds": 0.2}, 60))
        work.start()
        while not taken.are_taken:
            time.sleep(0.001)
        taken.begins(1)
        deadline = time.monotonic() + 60
        while status.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline
        taken.ends(1)
        work.join()
        assert process.ask({"seconds": 0.0}, 60)
    assert not taken.are_taken


@pytest.mark.usefixtures("taken")
def test_seconds_in_which_it_is_stopped_are_not_held_against_it(taken: ProcessPauser):
    with Working() as process:
        process.ask({"seconds": 0.0}, 60)
        raised: list[Exception] = []

        def ask(seconds: float, limit_s: float) -> None:
            try:
                process.ask({"seconds": seconds}, limit_s)
            except ProcessLostError as lost:
                raised.append(lost)

        for seconds, limit_s, fails in ((0.3, 1.5, False), (600.0, 0.1, True)):
            work = threading.Thread(target=ask, args=(seconds, limit_s))
            work.start()
            calling(taken, lambda work=work: not work.is_alive())
            assert bool(raised) is fails


def test_a_process_that_nobody_stops_has_the_usual_clock():
    code = "from dynamo_backends.workers import stopped_time as s; print(s.stopped_s())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout == "0.0\n"
    assert not stopped_time.is_stopped_by_parent()

"""A process that answers requests: answers, crashes, hangs."""

import contextlib
import json
import os
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from dynamo_backends.workers.worker_process import ProcessLostError, WorkerProcess

CHILD = textwrap.dedent("""
    import json, os, sys, time
    count = 0
    for line in sys.stdin:
        count += 1
        do = json.loads(line)["do"]
        if do == "crash":
            os.abort()
        if do == "hang":
            time.sleep(600)
        if do == "hoard":
            kept = bytearray(os.urandom(1 << 20) * 300)
            time.sleep(600)
        if do == "print":
            print("last words", file=sys.stderr, flush=True)
            os._exit(5)
        if do.startswith("talk"):
            print(json.dumps({"said": 1}), flush=True)
            print(json.dumps({"said": 2}), flush=True)
        if do == "talk and hang":
            time.sleep(600)
        print(json.dumps({"count": count}), flush=True)
""")


class Counting(WorkerProcess):
    command = ("-S", "-c", CHILD)

    def __init__(self, **more: Any) -> None:
        super().__init__(self.command, **more)


def test_a_crash_and_a_hang_cost_the_process_alone():
    with Counting() as process:
        assert not process.running
        assert [process.ask({"do": "count"}, 60)["count"] for _ in range(2)] == [1, 2]
        with pytest.raises(ProcessLostError, match="its process ended with status -6"):
            process.ask({"do": "crash"}, 60)
        assert not process.running
        assert process.ask({"do": "count"}, 60) == {"count": 1}
        with pytest.raises(ProcessLostError, match=r"it took more than 0\.2 s"):
            process.ask({"do": "hang"}, 0.2)
        assert process.ask({"do": "count"}, 60) == {"count": 1}
        child = process._child
    assert child is not None
    assert child.poll() is not None
    assert not process.running


def test_what_is_said_before_the_answer():
    heard: list[Any] = []
    with Counting() as process:
        assert process.ask({"do": "talk"}, 60, heard.append) == {"count": 1}
        assert heard == [1, 2]

        def impatient(said: Any) -> float:
            return 60 if said == 1 else 0.2

        with pytest.raises(ProcessLostError, match=r"it took more than 0\.2 s") as raised:
            process.ask({"do": "talk and hang"}, 60, impatient)
        assert raised.value.status is None


def test_a_process_that_cannot_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Counting, "command", ("-c", "raise SystemExit(3)"))
    with (
        Counting() as process,
        pytest.raises(ProcessLostError, match="its process ended with status 3"),
    ):
        process.ask({"do": "count", "long": "x" * (1 << 20)}, 60)


def test_an_interrupted_request_leaves_no_answer_behind():
    with Counting() as process:
        process.ask({"do": "count"}, 60)

        class Interrupted:
            def get(self, timeout: float) -> str:
                raise KeyboardInterrupt

        process._answers = Interrupted()  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            process.ask({"do": "count"}, 60)
        assert json.dumps(process.ask({"do": "count"}, 60)) == '{"count": 1}'


def test_a_request_is_lost_when_another_thread_ends_the_process():
    with Counting() as process:
        process.ask({"do": "count"}, 60)
        threading.Timer(0.3, process.end).start()
        with pytest.raises(ProcessLostError, match="its process ended with status -9"):
            process.ask({"do": "hang"}, None)
        assert process.ask({"do": "count"}, 60) == {"count": 1}


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12+: there are threads
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_leaves_the_process_to_its_parent():
    with Counting() as process:
        process.ask({"do": "count"}, 60)
        child = os.fork()
        if child == 0:
            process.disown()
            os._exit(process.ask({"do": "count"}, 60)["count"] != 1)
        assert os.waitpid(child, 0)[1] == 0, "the child has started another one"
        assert process.ask({"do": "count"}, 60) == {"count": 2}


def test_too_much_memory_ends_the_process():
    with Counting(memory_bytes=250e6) as process:
        assert process.ask({"do": "count"}, 60) == {"count": 1}
        with pytest.raises(ProcessLostError, match=r"0\.\d GB, of 0\.25 allowed") as raised:
            process.ask({"do": "hoard"}, 60)
        assert (raised.value.limit, raised.value.status) == ("memory", None)
        assert not process.running


def test_what_it_printed_last_is_known(tmp_path: Path):
    with Counting(output=tmp_path / "log") as process, pytest.raises(ProcessLostError) as raised:
        process.ask({"do": "print"}, 60)
    assert (raised.value.status, raised.value.last_line) == (5, "last words")


SERVING = """
import atexit, os, sys
from dynamo_backends.workers.worker_process import serve
status = int(os.environ["STATUS"])
if status:
    atexit.register(os._exit, status)
serve(lambda request, say: {"given": request, "variable": os.environ["STATUS"]})
print("the end", file=sys.stderr)
"""


@pytest.mark.parametrize("status", [0, 7])
def test_a_process_that_has_done_its_work_ends_by_itself(status: int, tmp_path: Path):
    variables = {"STATUS": str(status)}
    process = WorkerProcess(("-c", SERVING), output=tmp_path / "log", variables=variables)
    with process:
        answer = process.ask({"x": 1}, 120)
        assert answer == {"given": {"x": 1}, "variable": str(status)}
        with (
            pytest.raises(ProcessLostError, match="status 7")
            if status
            else contextlib.nullcontext()
        ):
            process.finish(60)
    assert (tmp_path / "log").read_text().strip() == "the end"
    process.finish(1)  # there is none

"""The process in which schedules are measured: answers, crashes, hangs."""

import json
import textwrap

import pytest

from dynamo_backends.tvm import measuring_process as process
from dynamo_backends.tvm.measuring_process import Lost, MeasuringProcess

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
        print(json.dumps({"count": count}), flush=True)
""")


@pytest.fixture(autouse=True)
def _child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_COMMAND", ("-S", "-c", CHILD))


def test_a_crash_and_a_hang_cost_the_process_alone():
    with MeasuringProcess() as lab:
        assert not lab.running
        assert [lab.ask({"do": "count"}, 60)["count"] for _ in range(2)] == [1, 2]
        with pytest.raises(Lost, match="its process ended with status -6"):
            lab.ask({"do": "crash"}, 60)
        assert not lab.running
        assert lab.ask({"do": "count"}, 60) == {"count": 1}
        with pytest.raises(Lost, match=r"it took more than 0\.2 s"):
            lab.ask({"do": "hang"}, 0.2)
        assert lab.ask({"do": "count"}, 60) == {"count": 1}
        child = lab._child
    assert child is not None
    assert child.poll() is not None
    assert not lab.running


def test_a_process_that_cannot_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "_COMMAND", ("-c", "raise SystemExit(3)"))
    with MeasuringProcess() as lab, pytest.raises(Lost, match="its process ended with status 3"):
        lab.ask({"do": "count", "long": "x" * (1 << 20)}, 60)


def test_an_interrupted_request_leaves_no_answer_behind(monkeypatch: pytest.MonkeyPatch):
    with MeasuringProcess() as lab:
        lab.ask({"do": "count"}, 60)

        class Interrupted:
            def get(self, timeout: float) -> str:
                raise KeyboardInterrupt

        lab._answers = Interrupted()  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            lab.ask({"do": "count"}, 60)
        assert json.dumps(lab.ask({"do": "count"}, 60)) == '{"count": 1}'

"""What tests of tuning share: functions, and a process without a process of its own."""

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from dynamo_backends.runtime.verdicts import TrialVerdict, VerdictStore
from dynamo_backends.tvm import records, search, trial, tuning
from dynamo_backends.workers import budget
from dynamo_backends.workers.worker_process import ProcessLostError

HEAD = """
# from tvm.script import tirx as T
@T.prim_func(private=True, s_tir=True)
"""

MATMUL = (
    HEAD
    + """
def main(a: T.Buffer((T.int64(16), T.int64(24)), "float32"),
         b: T.Buffer((T.int64(24), T.int64(32)), "float32"),
         c: T.Buffer((T.int64(16), T.int64(32)), "float32")):
    T.func_attr({"tirx.noalias": True})
    for i, j, k in T.grid(T.int64(16), T.int64(32), T.int64(24)):
        with T.sblock("matmul"):
            x, y, z = T.axis.remap("SSR", [i, j, k])
            T.reads(a[x, z], b[z, y])
            T.writes(c[x, y])
            with T.init():
                c[x, y] = T.float32(0.0)
            c[x, y] = c[x, y] + a[x, z] * b[z, y]
"""
)

ADD = (
    HEAD
    + """
def main(a: T.Buffer((T.int64(2), T.int64(2)), "DTYPE"),
         c: T.Buffer((T.int64(2), T.int64(2)), "DTYPE")):
    T.func_attr({"tirx.noalias": True})
    for i, j in T.grid(T.int64(2), T.int64(2)):
        with T.sblock("add"):
            x, y = T.axis.remap("SS", [i, j])
            T.reads(a[x, y])
            T.writes(c[x, y])
            c[x, y] = a[x, y] + a[x, y]
"""
)


def parsed(text: str, dtype: str = "float32") -> Any:
    """A function of TVM's."""
    from tvm.script import from_source

    return from_source(text.replace("DTYPE", dtype))


@pytest.fixture
def isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    """No budgets, counts, records or answers of other tests; no trials; no intrinsics."""
    monkeypatch.setattr(budget, "_budgets", {})
    monkeypatch.setattr(records, "_unwritten", {})
    monkeypatch.setattr(tuning, "COUNTS", tuning.Counts())
    monkeypatch.setattr(trial, "_verdicts", VerdictStore("tvm", (), shipped=False))
    monkeypatch.setattr(trial, "_try", lambda node: TrialVerdict())
    monkeypatch.setitem(sys.modules, search._INTRINSICS, types.ModuleType(search._INTRINSICS))


class FakeLaboratory:
    """Answers as a worker does, at once and as told.

    Attributes:
        asked: What was asked, with the hash of the function that was open.
        seconds: Of a function with its default schedule, from its text.
        kind: Of the schedules that are proposed, "tile" or "rules".
        on_attempt: Is called with the number of each trial before it is answered.
        faster: Whether the first proposal wins against the default schedule.
    """

    asked: list[tuple[str, str]]
    seconds: Callable[[str], float]
    kind: str
    on_attempt: Callable[[int], None]
    faster: bool

    def __init__(self) -> None:
        self.running = False
        self._attempts = 0

    def __enter__(self) -> "FakeLaboratory":
        return self

    def __exit__(self, *_: object) -> None:
        self.running = False

    def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        assert limit_s > 0
        if request["do"] == "open":
            self._function = parsed(request["function"])
            assert search.structural_fingerprint(self._function) == request["expected"]
            self._search = search.Search(self._function, request["threads"], request["seed"])
            self._threads = request["threads"]
            if self.kind == "tile":
                self._search._spaces = []
            else:
                self._search._tiles = []
            self.running = True
        assert self.running, "no function is open"
        self.asked.append((request["do"], search.structural_fingerprint(self._function)))
        answer: dict[str, Any] = getattr(self, f"_{request['do']}")(request)
        return answer

    def _open(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"seconds": self.seconds(request["function"])}

    def _attempt(self, request: dict[str, Any]) -> dict[str, Any]:
        self._attempts += 1
        try:
            self.on_attempt(self._attempts)
        except (ProcessLostError, KeyboardInterrupt):  # either ends the process
            self.running = False
            raise
        found = self._search.propose()
        if found is None:
            return {"exhausted": True}
        return {"seconds": float(self._attempts), "trace": found.trace}

    def _decide(self, request: dict[str, Any]) -> dict[str, Any]:
        if not self.faster:
            return {"winner": None}
        made = search.replayed(self._function, request["traces"][0], self._threads)
        return {"winner": 0, "mark": made.mark, "speedup": [2.0, 1.9, 2.1]}


@pytest.fixture
def process(isolated: None, monkeypatch: pytest.MonkeyPatch) -> type[FakeLaboratory]:
    """The fake one in the place of the real one; a class, whose attributes may be set."""

    class Fake(FakeLaboratory):
        asked: list[tuple[str, str]] = []  # noqa: RUF012
        kind = "rules"
        faster = True

        @staticmethod
        def seconds(text: str) -> float:
            return 1.0

        @staticmethod
        def on_attempt(number: int) -> None:
            pass

    monkeypatch.setattr(tuning, "MeasuringProcess", Fake)
    return Fake

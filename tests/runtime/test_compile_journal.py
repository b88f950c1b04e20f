"""A compilation that ends the process is left to eager in the next one."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.errors import CompileError
from dynamo_backends.interface.options import Options
from dynamo_backends.interface.plan import Plan
from dynamo_backends.interface.registry import get_backend
from dynamo_backends.pipeline import compiler_process
from dynamo_backends.runtime.compile_journal import ENDED, CompileJournalEntry, CompileOutcome

_CRASHES = """
import os, signal, torch, dynamo_backends
from dynamo_backends import Availability, Backend, register_backend
from dynamo_backends.interface.plan import SUPPORTED
class Crashes(Backend):
    name = "crashes"
    packages = {"torch": "torch"}
    def availability(self): return Availability(True, "", devices=("cpu",))
    def supports(self, node, options): return SUPPORTED
    def compile(self, graph, options): os.kill(os.getpid(), signal.SIGSEGV)
register_backend("crashes", Crashes)
f = torch.compile(lambda x: (x.sin() + 1).cos() * 2, backend=dynamo_backends.compiler("crashes"))
x = torch.ones(3)
with dynamo_backends.record() as reports:
    print(torch.equal(f(x), (x.sin() + 1).cos() * 2))
print([fallback.reason for fallback in reports[0].fallbacks])
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DYNAMO_BACKENDS_CACHE", str(tmp_path))
    return tmp_path


def test_the_process_after_a_crash_runs_in_eager(folder):
    run = lambda: subprocess.run(  # noqa: E731
        [sys.executable, "-c", _CRASHES], capture_output=True, text=True, timeout=300, check=False
    )
    first = run()
    assert first.returncode == -signal.SIGSEGV, first.stderr
    second = run()
    assert second.returncode == 0, second.stderr
    assert second.stdout.startswith("True"), second.stdout
    assert ENDED in second.stdout


def test_entries_of_living_processes_say_nothing(folder):
    journal = CompileJournalEntry("a block")
    assert journal.outcome is CompileOutcome.UNKNOWN
    with journal.note_running():
        assert journal.outcome is CompileOutcome.UNKNOWN
    child = os.fork()
    if child == 0:
        entered = journal.note_running()  # collected, it would be left
        entered.__enter__()
        os._exit(0)
    os.waitpid(child, 0)
    assert journal.outcome is CompileOutcome.INTERRUPTED
    journal.note_crash()
    assert CompileJournalEntry("a block").outcome is CompileOutcome.CRASHED
    assert CompileJournalEntry("another").outcome is CompileOutcome.UNKNOWN
    journal.clear()
    assert journal.outcome is CompileOutcome.UNKNOWN


@pytest.mark.parametrize("crashes", [False, True])
def test_what_ended_a_process_is_compiled_in_another(folder, monkeypatch, crashes):
    backend, options = get_backend("openxla"), Options()
    journal = CompileJournalEntry(f"openxla {backend.versions()} mark")
    journal._put(CompileOutcome.INTERRUPTED, [os.getpid(), "never"])
    assert journal.outcome is CompileOutcome.INTERRUPTED

    def compiled(*_):
        if crashes:
            raise compiler_process.CompilerLostError("signal 11")
        return "executable"

    def fails():
        raise AssertionError("it is not compiled in this process")

    monkeypatch.setattr(compiler_process, "compile_in_subprocess", compiled)
    graph = Graph(torch.fx.symbolic_trace(lambda x: x), "inference", ())
    arguments = (backend, options, Plan(), graph, "mark", fails, {})
    if crashes:
        for _ in range(2):
            with pytest.raises(CompileError, match=ENDED):
                compiler_process.compile_with_crash_journal(*arguments)
        assert journal.outcome is CompileOutcome.CRASHED
    else:
        assert compiler_process.compile_with_crash_journal(*arguments) == "executable"
        assert journal.outcome is CompileOutcome.UNKNOWN

"""Who waits for padded programs, and what becomes of the wide ones."""

import subprocess
import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends.interface.counters import total
from dynamo_backends.interface.errors import NotPaddedError, OptionError
from dynamo_backends.interface.report import record
from dynamo_backends.pipeline import background
from dynamo_backends.pipeline.shapes import padded_programs as padding
from tests.xla.test_padded import agree, compiled, many_recompilations, varying

__all__ = ["many_recompilations"]

Job = tuple[Hashable, Callable[[], None]]


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """What was to be done beside the calls; `done` does it."""
    waiting: list[Job] = []

    def submit(mark: Hashable, job: Callable[[Any], None], owner: Any) -> bool:
        mark = id(owner), mark
        if all(mark != other for other, _ in waiting):
            waiting.append((mark, lambda: job(owner)))
        return True

    monkeypatch.setattr(background, "submit_compilation", submit)
    return waiting


def done(jobs: list[Job]) -> int:
    """Does all that waits, and what that asks for; returns how much it was."""
    count = 0
    while jobs:
        _, job = jobs.pop(0)
        job()
        count += 1
    return count


def called(run: Callable[..., Any], fn: Callable[..., Any], *sizes: Sequence[int]) -> None:
    for size in sizes:
        x = varying(torch.randn(tuple(size)))
        agree(run(x), fn(x))


def fn(x: Tensor) -> Tensor:
    return (x.softmax(1) * 2).sum(0)


def test_a_new_size_is_served_at_once_and_a_narrower_program_takes_over(jobs: list[Job]):
    with record() as reports:
        run = compiled(fn, bucket_growth=1.1)
        called(run, fn, (7, 30))
        assert reports[0].compilations[0].shapes == ("x: float32[s77≤8, s27≤32]",)
        called(run, fn, (6, 30), (5, 10), (6, 30))
        assert reports[0].executables == 1, "nobody waited"
        done(jobs)
        shapes = [c.shapes[0] for c in reports[0].compilations]
        assert "x: float32[s77≤5, s27≤12]" in shapes
        before = reports[0].executables
        called(run, fn, (5, 10))
        called(run, fn, (5, 11))
        assert reports[0].executables == before
        narrow = next(s for s in reports[0].traffic() if "≤5, s27≤12" in s.shapes[0])
        assert (narrow.by, narrow.calls) == ("padded", 2)


def test_no_more_programs_are_made_than_may_be_kept(jobs: list[Job]):
    with record() as reports:
        run = compiled(fn, bucket_growth=1.1, max_executables=3, exact_after=1000)
        called(run, fn, (8, 64))
        called(run, fn, *((b, n) for b in (2, 3, 5, 7) for n in (5, 20, 43)))
        done(jobs)
        called(run, fn, *((b, n) for b in (2, 3, 5, 7) for n in (6, 21, 44)))
        done(jobs)
        assert reports[0].executables == 3
        called(run, fn, (9, 64))
        assert reports[0].executables == 4, "none served it"


def test_a_call_waits_where_padding_takes_longer(jobs: list[Job]):
    with record() as reports:
        run = compiled(fn, bucket_growth=1.1, exact_after=1000)
        called(run, fn, (8, 64))
        padded = reports[0].executable._padded
        (program,) = padded._programs
        program.program.served.seconds = 0.0  # it was on disk
        called(run, fn, (3, 60))
        assert reports[0].executables == 1, "less than four times the positions"
        called(run, fn, (2, 10))
        assert reports[0].executables == 2
        program.program.served.seconds = 100.0
        called(run, fn, (2, 40))
        assert reports[0].executables == 2


def test_exact_executables_are_made_beside_the_calls(jobs: list[Job]):
    with record() as reports:
        run = compiled(fn, bucket_growth=2.0, exact_after=2)
        called(run, fn, *[(7, 30)] * 5)
        assert [(s.by, s.calls) for s in reports[0].traffic()] == [("padded", 5)]
        assert done(jobs) == 1, "asked for once"
        called(run, fn, *[(7, 30)] * 2)
        assert [(s.by, s.calls) for s in reports[0].traffic()] == [("padded", 5), ("exact", 2)]


def test_padding_that_takes_less_than_compiling_is_borne(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch
):
    with record() as reports:
        run = compiled(fn, bucket_growth=2.0)
        called(run, fn, *[(7, 30)] * 9)
        assert not jobs
        (wide,) = reports[0].executable._padded._programs
        wide.program.served.seconds = 0.0  # so long it took to compile
        called(run, fn, (7, 30))
        assert not jobs, "it was on disk"
        monkeypatch.setattr(padding, "COMPILATION_S", 0.0)
        called(run, fn, (7, 30))
        assert done(jobs) == 1
        called(run, fn, (7, 30))
        assert [(s.by, s.calls) for s in reports[0].traffic()] == [("padded", 11), ("exact", 1)]


def test_the_first_sizes_keep_their_program(jobs: list[Job]):
    with record() as reports:
        run = compiled(fn)
        for size in ((7, 30), (6, 30), (5, 30)):
            x = torch.randn(size)
            agree(run(x), fn(x))
        done(jobs)
        before = sum(r.executables for r in reports)
        for _ in range(2):
            x = torch.randn(7, 30)
            agree(run(x), fn(x))
        done(jobs)
    _, varied = reports
    assert sum(r.executables for r in reports) == before
    assert [s.calls for s in varied.traffic() if s.by == "exact"] == [2]


def test_sizes_that_cannot_be_kept_are_not_compiled_all_the_time(jobs: list[Job]):
    sizes = [(7, n) for n in range(26, 32)]
    with record() as reports:
        run = compiled(fn, bucket_growth=2.0, exact_after=1, max_executables=2)
        made = []
        for _ in range(12):
            for size in sizes:
                called(run, fn, size)
                done(jobs)
            made.append(reports[0].executables)
    assert made[-1] < 20, "each would be compiled at every second call"


def test_a_narrower_program_that_fails_is_done_without(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch
):
    with record() as reports:
        run = compiled(fn, bucket_growth=1.1, exact_after=1000)
        called(run, fn, (8, 64), (5, 20))
        padded = reports[0].executable._padded

        def failing(graph: Any) -> Any:
            raise RuntimeError("no memory")

        monkeypatch.setattr(padded, "_build", failing)
        assert done(jobs) < 20
        called(run, fn, (5, 20), (5, 21), (4, 30))
        done(jobs)
    assert reports[0].exact == ""
    assert reports[0].executables == 1


def test_the_calls_of_a_thread_and_the_compiler_beside_them():
    wrong: list[Any] = []

    def serve(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(25):
            b, n = (int(torch.randint(2, m, (), generator=generator)) for m in (9, 33))
            x = torch.randn(b, n, generator=generator)
            if not torch.allclose(run(x), fn(x), atol=1e-5):
                wrong.append((seed, b, n))

    run = compiled(fn, bucket_growth=1.1)
    called(run, fn, (8, 32))
    threads = [threading.Thread(target=serve, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert background.wait_until_idle(120)
    assert not wrong


def test_eager_serves_what_is_wide_where_nobody_is_to_wait(jobs: list[Job]):
    with record() as reports:
        run = compiled(fn, bucket_growth=1.1, exact_after=1000, while_compiling="eager")
        called(run, fn, (8, 64))
        jobs.pop(0)[1]()  # the program of these sizes
        called(run, fn, (8, 64), (3, 20))
        jobs.pop(0)[1]()  # finds that it serves the smaller ones, too, and asks for a narrower one
        called(run, fn, (3, 20))
        (wide, eager) = reports[0].executable.served
        assert (wide.by, wide.calls) == ("padded", 1)
        assert (eager.by, eager.calls) == ("eager while compiling", 3)
        assert done(jobs) == 2, "the narrower program; there is to be no other"
        called(run, fn, (3, 20), (3, 20), (8, 64))
    wide, narrow, eager = reports[0].executable.served
    assert (wide.calls, narrow.calls, eager.calls) == (2, 2, 3)


def test_after_warm_up_nothing_compiles():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    options = {"bucket_growth": 1.1, "cache": False}
    run = torch.compile(model, backend="openxla", options=options)
    with torch.no_grad():
        ready = dynamo_backends.warm_up(run, [(torch.zeros(n, 6),) for n in (2, 5, 30, 64)])
        assert ready.complete
        before = total.compilations
        with dynamo_backends.run(), record() as reports:
            for n in (2, 3, 17, 30, 44, 64):
                x = torch.randn(n, 6)
                torch.testing.assert_close(run(x), model(x))
            assert total.compilations == before
            assert not reports


def test_named_bounds():
    with record() as reports:
        run = compiled(fn, bucket_growth=1, buckets={"x": {0: [3, 6], 1: [10, 20, 30]}})
        called(run, fn, (2, 9))
        called(run, fn, (5, 21))
        assert background.wait_until_idle(60)
        called(run, fn, (5, 31))
    shapes = [c.shapes[0] for c in reports[0].compilations]
    assert shapes[0] == "x: float32[s77≤3, s27≤10]"
    assert shapes[1] == "x: float32[s77≤6, s27≤30]"
    assert shapes[-1] == "x: float32[5, 31]", "larger than any"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((4, 4), r"an increasing list of positive integers, not \(4, 4\)"),
        ([0], "positive integers"),
        ([True], "positive integers"),
        (["8"], "positive integers"),
        ({"x": [4]}, r"must map input names to dimensions, .* not \{'x': \[4\]\}"),
        ({"x": {"0": [4]}}, "a dimension of 'x' must be an integer, not '0'"),
        ({"x": {0: [8, 4]}}, "bounds of dimension 0 of 'x' must be an increasing list"),
        (8, "option 'buckets' of openxla must be tuple or list or dict"),
    ],
)
def test_bad_bounds(given: Any, text: str):
    with pytest.raises(OptionError, match=text):
        dynamo_backends.compiler("openxla", buckets=given)


@pytest.mark.long
def test_the_process_ends_while_programs_are_made():
    code = """
import torch
run = torch.compile(lambda x: (x.softmax(1) * 2).sum(0), backend="openxla", dynamic=True,
                    options={"bucket_growth": 1.1, "cache": False})
for n in range(5, 60):
    run(torch.randn(4, n))
print("called")
"""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], timeout=300, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (0, "called\n"), ended.stderr


def test_an_error_of_the_first_program_makes_the_graph_exact(monkeypatch: pytest.MonkeyPatch):
    def refusing(self: Any, mark: str, bounds: Any) -> None:
        raise NotPaddedError("aten.relu", "of no reason")

    monkeypatch.setattr(padding.PaddedPrograms, "_made", refusing)
    with record() as reports:
        run = compiled(fn)
        called(run, fn, (5, 7))
    assert "of no reason" in reports[0].exact

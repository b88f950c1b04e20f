"""`while_compiling="eager"`: calls run in eager while a thread compiles."""

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.fx.experimental.proxy_tensor import make_fx

import dynamo_backends
from dynamo_backends import Executable, Options
from dynamo_backends import _torch_private as private
from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.errors import CompileError, FallbackRefusedError, OptionError
from dynamo_backends.pipeline import background
from dynamo_backends.pipeline.captured import compile_captured
from dynamo_backends.workers.turns import ProcessPauser
from tests.test_ranges import Counting


class Gated(Counting):
    """Compiles once it is let; notes in which threads it did."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.threads: set[str] = set()
        self.error: Exception | None = None

    def compile(self, graph: Graph, options: Options) -> Executable:
        assert self.gate.wait(60)
        self.threads.add(threading.current_thread().name)
        if self.error is not None:
            raise self.error
        return super().compile(graph, options)


@pytest.fixture
def backend() -> Iterator[Gated]:
    made = Gated()
    yield made
    made.gate.set()
    assert background.wait_until_idle(60)


def compiled(
    fn: Callable[..., Any], backend: Counting, dynamic: bool, **settings: Any
) -> Callable[..., Any]:
    given = {"cache": False, "min_block_size": 1, "while_compiling": "eager", **settings}
    options = Options(**given)
    return torch.compile(
        fn, backend=lambda gm, args: compile_captured(backend, gm, args, options), dynamic=dynamic
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_calls_run_in_eager_until_the_program_is_there(backend: Gated, dynamic: bool):
    def function(x: Tensor) -> Tensor:
        return (x * 2).relu().sum(1)

    run = compiled(function, backend, dynamic)
    with dynamo_backends.record() as reports:
        for _ in range(3):
            x = torch.randn(3, 5)
            torch.testing.assert_close(run(x), function(x))
            x.fill_(float("nan"))  # the caller's to change
    assert backend.compiled == 0
    backend.gate.set()
    assert background.wait_until_idle(60)
    assert backend.compiled == 1, "the same sizes are compiled once"
    assert backend.threads == {"dynamo_backends compiler"}
    (report,) = reports
    assert report.verified == 0
    x = torch.randn(3, 5)
    torch.testing.assert_close(run(x), function(x))
    assert report.verified == 1, "the first call that the program serves is compared"


def test_a_program_for_a_range_serves_new_sizes_at_once(backend: Gated):
    run = compiled(lambda x: x.sin() + 1, backend, dynamic=True)
    backend.gate.set()
    for size in ((3, 5), (4, 7), (6, 2)):
        run(torch.randn(size))
        assert background.wait_until_idle(60)
    backend.gate.clear()
    x = torch.randn(9, 11)
    torch.testing.assert_close(run(x), x.sin() + 1)
    assert not background._worker.marks
    assert backend.compiled == 1


def test_gradients(backend: Gated):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    run = compiled(model, backend, dynamic=True)
    for size in (5, 5, 6, 7, 5, 8):
        x = torch.randn(size, 4)
        (expected,) = torch.autograd.grad(model(x).square().sum(), [model[0].weight])
        (found,) = torch.autograd.grad(run(x).square().sum(), [model[0].weight])
        torch.testing.assert_close(found, expected)
        backend.gate.set()
        assert background.wait_until_idle(60)
    assert backend.compiled == 2, "forward and backward"


def test_weights_are_prepared_beside_the_calls_and_never_stale(backend: Gated):
    model = nn.Linear(4, 3).eval()
    run = compiled(model, backend, dynamic=False)
    x = torch.randn(2, 4)
    with torch.no_grad():
        run(x)
        model.weight.mul_(2)
        backend.gate.set()
        assert background.wait_until_idle(60)
        torch.testing.assert_close(run(x), model(x))
        model.weight.add_(1)
        torch.testing.assert_close(run(x), model(x))


def test_what_cannot_be_compiled_stays_in_eager_with_the_reason(backend: Gated):
    backend.error = CompileError("no way to compile this")
    backend.gate.set()
    run = compiled(lambda x: x.cos() * 3, backend, dynamic=True)
    x = torch.randn(3)
    with dynamo_backends.record() as reports:
        for _ in range(2):
            torch.testing.assert_close(run(x), x.cos() * 3)
            assert background.wait_until_idle(60)
    assert "no way to compile this" in reports[0].fallbacks[0].reason


def test_what_must_not_run_in_eager_raises_at_the_next_call(backend: Gated):
    backend.error = CompileError("no way to compile this")
    backend.gate.set()
    run = compiled(lambda x: x.cos() * 4, backend, dynamic=True, fallback="error")
    run(torch.randn(3))
    assert background.wait_until_idle(60)
    with pytest.raises(FallbackRefusedError, match="no way to compile this"):
        run(torch.randn(3))


def test_nothing_is_compiled_under_run(backend: Gated):
    run = compiled(lambda x: x.cos() * 5, backend, dynamic=True)
    backend.gate.set()
    run(torch.randn(3))
    assert background.wait_until_idle(60)
    with dynamo_backends.run():
        x = torch.randn(4)
        torch.testing.assert_close(run(x), x.cos() * 5)
        assert not background._worker.marks


def test_what_waits_for_a_model_that_is_gone_is_left_out(backend: Gated):
    x = torch.randn(2, 4)
    compiled(lambda x: x.sin() - 1, backend, dynamic=False)(x)  # under way until the gate opens
    model = nn.Linear(4, 3).eval()
    weight = weakref.ref(model.weight)
    with torch.no_grad():
        compiled(model, backend, dynamic=False)(x)
    assert len(background._worker.marks) == 2
    del model
    torch._dynamo.reset()
    gc.collect()
    assert len(background._worker.marks) == 1
    assert weight() is None
    backend.gate.set()
    assert background.wait_until_idle(60)
    assert backend.compiled == 1


def test_the_thread_sleeps_while_calls_run(monkeypatch: pytest.MonkeyPatch):
    worker, asks = background._worker, background._worker._pause
    sleeps, goes_on, over = threading.Event(), threading.Event(), threading.Event()
    steps, held = [0], list[int]()

    def watched() -> float:
        pause = asks()
        if pause:
            held.append(steps[0])
            sleeps.set()
        return pause

    def job() -> None:
        while not over.is_set():
            steps[0] += 1
            if held and steps[0] > held[0] + 100:
                goes_on.set()

    def call(args: list[Any]) -> list[Any]:
        assert sleeps.wait(60), "the thread sees that a call is under way"
        time.sleep(0.1)
        held.append(steps[0])
        return args

    for pause in ("_PAUSE", "_LONGEST_PAUSE"):
        monkeypatch.setattr(background, pause, 3600.0)
    monkeypatch.setattr(worker, "_pause", watched)
    background.submit_compilation("works", job)
    try:
        assert background.prioritize_calls(call)([1]) == [1]
        assert len(set(held)) == 1, "nothing is done meanwhile"
        assert goes_on.wait(60), "the call is over"
    finally:
        over.set()
    assert background.wait_until_idle(60)


def test_a_backward_pass_is_a_part_of_its_call(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(background, "turns", ProcessPauser())  # with no process of another test
    hold = threading.Event()
    background.submit_compilation("waits", lambda: hold.wait(60))
    seen: list[list[int]] = []
    x = torch.ones(3, requires_grad=True)
    x.register_hook(lambda _: seen.append(list(background.turns._callers)))
    y = x * 2
    background.prioritize_backward([y, None, torch.ones(3)])
    y.sum().backward()
    assert seen == [[threading.get_ident()]]
    assert not background.turns._callers
    hold.set()
    assert background.wait_until_idle(60)
    background.prioritize_backward([z := x * 2])
    assert not z._backward_hooks, "nothing is under way"


def test_a_backward_pass_that_fails_is_over_some_time(monkeypatch: pytest.MonkeyPatch):
    def fails(_: torch.Tensor) -> None:
        raise RuntimeError("no gradient")

    monkeypatch.setattr(background, "_LONGEST_BACKWARD_S", 0.05)
    hold = threading.Event()
    background.submit_compilation("waits", lambda: hold.wait(60))
    x = torch.ones(3, requires_grad=True)
    x.register_hook(fails)
    y = x * 2
    background.prioritize_backward([y])
    with pytest.raises(RuntimeError, match="no gradient"):
        y.sum().backward()
    end = time.monotonic() + 60
    while background.turns._callers:
        assert time.monotonic() < end
    hold.set()
    assert background.wait_until_idle(60)


def test_the_thread_does_not_wait_for_its_own_calls():
    seen: list[list[int]] = []

    def call(args: list[Any]) -> list[Any]:
        seen.append(list(background.turns._callers))
        return args

    background.submit_compilation("calls", lambda: background.prioritize_calls(call)([]))
    assert background.wait_until_idle(60)
    assert seen == [[]]


def test_autotune_refuses():
    with pytest.raises(OptionError, match="while_compiling must be 'wait', not 'eager'"):
        dynamo_backends.compiler("autotune", while_compiling="eager")


def test_steps_refuse():
    model = nn.Linear(2, 2)
    with pytest.raises(OptionError, match="compile_step with openxla compiles synchronously"):
        dynamo_backends.compile_step(
            lambda x: model(x),
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), 0.1),
            options={"while_compiling": "eager"},
        )


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_child_starts_its_own_thread():
    code = """
import os, threading
from dynamo_backends.pipeline import background
hold = threading.Event()
background.submit_compilation(1, hold.wait)
child = os.fork()
if child == 0:
    done = []
    background.submit_compilation(1, lambda: done.append(threading.current_thread().name))
    ended = background.wait(30)
    os._exit(0 if ended and done == ["dynamo_backends compiler"] else 1)
assert os.waitpid(child, 0)[1] == 0
hold.set()
assert background.wait(30)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def test_the_process_ends_while_something_is_compiled():
    code = """
import threading
from dynamo_backends.pipeline import background
begun = threading.Event()
def job():
    while True:
        begun.set()
background.submit_compilation(1, job)
background.submit_compilation(2, job)
assert begun.wait(60)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


class Tracing(Counting):
    """Traces while it compiles, and stays in the middle of that until it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.gate = threading.Event(), threading.Event()

    def compile(self, graph: Graph, options: Options) -> Executable:
        def function(x: Tensor) -> Tensor:
            self.inside.set()
            assert self.gate.wait(60)
            return x.sin()

        traced = make_fx(function)(torch.randn(3))
        assert [n.op for n in traced.graph.nodes] == ["placeholder", "call_function", "output"]
        return super().compile(graph, options)


def test_calls_see_nothing_of_what_the_thread_traces():
    # While torch traces, compiled functions raise in all threads, and modules are called otherwise.
    backend, model = Tracing(), nn.Linear(4, 3)
    before = nn.Module.__call__, nn.Module.__getattr__
    run = compiled(model, backend, dynamic=False)
    x = torch.randn(2, 4)
    try:
        run(x)
        assert backend.inside.wait(60)
        torch.testing.assert_close(run(x), model(x))
        assert (nn.Module.__call__, nn.Module.__getattr__) == before
        captured = make_fx(lambda x: x.cos())(x)  # two traces at once, of which this one ends first
        assert not is_fx_symbolic_tracing()
    finally:
        backend.gate.set()
        assert background.wait_until_idle(60)
    assert not is_fx_symbolic_tracing()
    assert (nn.Module.__call__, nn.Module.__getattr__) == before
    torch.testing.assert_close(captured(x), x.cos())
    torch.testing.assert_close(run(x), model(x))
    assert backend.compiled == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_fake_mode_of_the_capture_is_left_to_the_calling_thread(dynamic: bool):
    modes: list[Any] = []

    class UsesTheMode(Gated):
        """Compiles while a call is executed on the fake tensors of the capture."""

        devices: frozenset[str] = frozenset()

        def check_graph(self, graph: Graph, options: Options) -> None:
            super().check_graph(graph, options)
            modes.append(
                private.find_fake_mode([place.meta["val"] for place in graph.placeholders])
            )
            modes[0].in_kernel_invocation = True  # until the program is there

        def compile(self, graph: Graph, options: Options) -> Executable:
            values = [node.meta["val"] for node in (*graph.placeholders, *graph.calls)]
            self.devices = frozenset(str(v.device) for v in values if isinstance(v, Tensor))
            return super().compile(graph, options)

    backend = UsesTheMode()
    backend.gate.set()
    run = compiled(lambda x: (x * 2).relu().sum(1), backend, dynamic)
    x = torch.randn(3, 5)
    with dynamo_backends.record() as reports:
        for _ in range(2):
            torch.testing.assert_close(run(x), (x * 2).relu().sum(1))
            assert background.wait_until_idle(60)
    modes[0].in_kernel_invocation = False
    (report,) = reports
    assert not report.failures
    assert backend.compiled == 1
    assert backend.devices == {"cpu"}

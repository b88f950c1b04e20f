"""Whatever stops a step, parameters, buffers and state are those before it or those after it."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends import StepCaptureError, compile_step
from dynamo_backends.aot.step.program.record_program import TRACING
from dynamo_backends.runtime import atomic_copies as whole
from tests import rotation
from tests.aot import step_nets as nets
from tests.aot.interruptions import Instructions, watched

BACKENDS = ("openxla", "aot_eager", "inductor")
FILES = (
    "aot/step/program/record_program.py", "aot/step/program/programs.py",
    "runtime/atomic_copies.py",
    "xla/step_runtime.py", "xla/updating.py", "xla/owned_memory.py", "inductor/steps.py",
    "graph/layouts.py", "signal.py", "/torchinductor_",
)  # fmt: skip
"""Where a step runs; "/torchinductor_" is the folder of Inductor's programs."""


def test_these_files_exist() -> None:
    package = Path(dynamo_backends.__file__).parent
    named = [name for name in FILES if "/" in name and name.endswith(".py")]
    assert all((package / name).is_file() for name in named)


class Crash(Exception):
    pass


class Training:
    """A net in training, compiled, whose gradients stay from step to step.

    Args:
        backend: Of `compile_step`.
        shared: Whether somebody else sees the memory of a weight, which then stays where it is.
    """

    def __init__(self, backend: str, shared: bool = False):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False)).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.view = self.model[0].weight.detach() if shared else None
        self.step = compile_step(
            self._function, model=self.model, optimizer=self.optimizer, backend=backend
        )
        self._x, self._y = (t.double() if t.is_floating_point() else t for t in nets.rows(1)[0])
        for _ in range(3):  # the first has no gradients yet
            self()

    def _function(self, x: Tensor, y: Tensor) -> Tensor:
        loss = nets.entropy(self.model, (x, y))
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def __call__(self) -> Tensor:
        return self.step(self._x, self._y)

    @property
    def program(self) -> Any:
        return list(self.step._programs.kept)[-1].compiled

    def living(self) -> list[Tensor]:
        """Everything that the next step depends on."""
        found = list(self.model.state_dict(keep_vars=True).values())
        found += [v for s in self.optimizer.state.values() for v in s.values()]
        return found + [p.grad for p in self.model.parameters() if p.grad is not None]

    def contents(self) -> list[Tensor]:
        return [t.detach().clone() for t in self.living()]

    def put(self, contents: list[Tensor]) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.living(), contents)

    def moment(self, before: list[Tensor], after: list[Tensor]) -> str:
        """Which of both is now."""
        now = self.contents()
        for name, contents in (("before", before), ("after", after)):
            if all(map(torch.equal, now, contents)):
                return name
        return "between"

    def before_and_after(self) -> tuple[list[Tensor], list[Tensor]]:
        """The contents around a step; those before it are there again."""
        before = self.contents()
        self()
        after = self.contents()
        assert not all(map(torch.equal, before, after))
        self.put(before)
        return before, after


@pytest.fixture(autouse=True)
def _signals_interrupt() -> Iterator[None]:
    """SIGINT raises, also where the tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
    # A trace function raises where Python handles no signals, as before a lock is released.
    while TRACING._is_owned():
        TRACING.release()


@pytest.mark.parametrize(
    ("backend", "shared"), [(b, False) for b in BACKENDS] + [("openxla", True)]
)
def test_a_signal_at_any_instruction(
    backend: str, shared: bool, request: pytest.FixtureRequest
) -> None:
    """At every 13th, others in each run, and at every one with `--full`."""
    training = Training(backend, shared)
    before, after = training.before_and_after()
    counting = Instructions(FILES)
    with watched(counting):
        training()
    moments = []
    stride = 1 if request.config.getoption("--full") else 13
    numbers = rotation.part(counting.count, stride)
    for number in numbers:
        training.put(before)
        with pytest.raises(KeyboardInterrupt), watched(Instructions(FILES, number)):
            training()
        moments.append(training.moment(before, after))
        training.put(before)
        training()
        assert training.moment(before, after) == "after", number
    assert counting.count > 100
    assert "between" not in moments, numbers[moments.index("between")]
    assert {"before", "after"} <= set(moments)
    assert moments == sorted(moments, reverse=True), "once it is after, it stays so"


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_before_the_launch(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(backend)
    before, after = training.before_and_after()

    def broken(*_: Any) -> Iterator[Any]:
        raise Crash

    name = {"openxla": "_execute", "aot_eager": "_run", "inductor": "_compute"}[backend]
    with monkeypatch.context() as patch:
        patch.setattr(training.program, name, broken)
        with pytest.raises(Crash):
            training()
    assert training.moment(before, after) == "before"
    training()
    assert training.moment(before, after) == "after"


def test_an_error_after_the_results_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training("openxla")
    before, after = training.before_and_after()
    execute = training.program._execute

    def broken(buffers: Any) -> Iterator[Any]:
        yield from execute(buffers)
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(training.program, "_execute", broken)
        with pytest.raises(Crash):
            training()
    assert training.moment(before, after) == "after"


@pytest.mark.parametrize("backend", ["openxla", "aot_eager"])
def test_an_error_in_one_of_several_copies(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(backend, shared=True)
    before, after = training.before_and_after()

    def broken(targets: list[Tensor], values: list[Tensor]) -> None:
        targets[0].copy_(values[0])
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", broken)
        with pytest.raises(Crash):
            training()
    assert training.moment(before, after) == "after"


def test_results_that_xla_loses_are_not_taken_for_contents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = Training("openxla")
    execute = training.program._execute

    def broken(buffers: Any) -> Iterator[Any]:
        list(execute(buffers))
        raise Crash("no results")
        yield

    monkeypatch.setattr(training.program, "_execute", broken)
    with pytest.raises(StepCaptureError, match=r"failed while it ran a program \(no results\)"):
        training()
    for tensor in training.model.state_dict().values():
        lost = tensor.isnan() if tensor.is_floating_point() else tensor < 0
        assert lost.all()


def failing_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets tanh's gradient be computed by a function of Python's that may raise inside of XLA."""
    from dataclasses import replace

    import jax

    from dynamo_backends.xla.lowering import registry

    op = torch.ops.aten.tanh_backward.default
    row = registry.lookup(op)
    assert row is not None

    def on_host(gradient: Any, y: Any) -> Any:
        if failing_call.fails:  # type: ignore[attr-defined]
            raise Crash("inside of XLA")
        return gradient * (1 - y * y)

    def lowering(gradient: Any, y: Any) -> Any:
        return jax.pure_callback(on_host, jax.ShapeDtypeStruct(y.shape, y.dtype), gradient, y)

    monkeypatch.setitem(registry._TABLE, op, replace(row, fn=lowering))


@pytest.mark.parametrize("given", [False, True], ids=["as it is", "donated all the same"])
def test_an_error_inside_of_xla(given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls out of XLA can fail after it began to write, so such programs are given nothing."""
    from dynamo_backends.xla import _jaxlib, steps

    failing_call(monkeypatch)
    failing_call.fails = False  # type: ignore[attr-defined]
    kept = []

    def compile_with_callbacks(lowered: Any, device: Any, *_: bool) -> Any:
        kept.append(lowered)  # it owns the functions that XLA calls
        return device.client.compile_and_load(
            lowered.compiler_ir("stablehlo"),
            _jaxlib._jax.DeviceList((device.handle,)),
            _jaxlib._compile_options(device.handle),
            lowered._lowering.compile_args["host_callbacks"],
        )

    monkeypatch.setattr(steps, "_compile", compile_with_callbacks)
    if given:
        monkeypatch.setattr(steps, "find_custom_calls", lambda lowered: set())
    torch.manual_seed(0)
    model = nets.mlp()
    optimizer = torch.optim.AdamW(model.parameters())

    def function(x: Tensor, y: Tensor) -> Tensor:
        loss = nets.entropy(model, (x, y))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    options = {"cache": False}
    step = compile_step(function, model=model, optimizer=optimizer, options=options)
    x, y = nets.rows(1)[0]
    step(x, y)
    before = [t.clone() for t in model.state_dict().values()]
    failing_call.fails = True  # type: ignore[attr-defined]
    with pytest.raises(
        Exception, match="lost and were filled with NaN" if given else "inside of XLA"
    ):
        step(x, y)
    now = list(model.state_dict().values())
    if given:
        assert all(t.isnan().all() for t in now)
    else:
        assert all(map(torch.equal, now, before))


def test_what_may_be_repeated_is_done_whatever_interrupts_it() -> None:
    done: list[int] = []

    def action() -> None:
        done.append(len(done))
        if len(done) < 4:
            raise KeyboardInterrupt

    whole.retry_until_complete(action)
    assert done == [0, 1, 2, 3]


def interrupted(came: list[str]) -> None:
    with whole.defer_signals():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGUSR1)
        came.append("inside")


def test_signals_that_are_held_come_afterwards() -> None:
    came: list[str] = []
    handler = signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda *_: came.append("handled"))
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted(came)
        assert came == ["inside", "handled"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGUSR1, handler)


def test_contents_that_change_places() -> None:
    """Two buffers become each other's contents: neither may be written before the other is read."""
    for backend in BACKENDS:
        model = nn.Linear(2, 1).double()
        model.register_buffer("a", torch.tensor([1.0, 2.0], dtype=torch.float64))
        model.register_buffer("b", torch.tensor([3.0, 4.0], dtype=torch.float64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def function(x: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            loss = model(x).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                a = model.a.clone()
                model.a.copy_(model.b)
                model.b.copy_(a)
            return loss

        step: Callable[..., Any] = compile_step(
            function, model=model, optimizer=optimizer, backend=backend
        )
        step(torch.ones(1, 2, dtype=torch.float64))
        assert model.a.tolist() == [3.0, 4.0], backend
        assert model.b.tolist() == [1.0, 2.0], backend

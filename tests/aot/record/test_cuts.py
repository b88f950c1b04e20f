"""Steps by replay: cuts, parts in eager, exceptions, signals and threads."""

import gc
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynamo_backends import OptionError, StepCaptureError, compile_step
from tests.aot.record.checks import Case, Run, assert_equal, batches, compare, copied, network
from tests.aot.record.test_training import plain, reads_the_loss, skips_by_value


def views_of_weights_after_a_cut(run: Run) -> Any:
    """They are made before a value that Python reads, used and written to behind it."""
    run.state.norms = []

    def step(x: Tensor, y: Tensor) -> Any:
        whole, row = run.model[0].weight.detach(), run.model[2].weight.detach()[1]
        run.state.norms.append(row.norm().item())
        before = row.sum() + whole.sum()
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        torch._foreach_lerp_([whole], [run.model[0].weight.detach() * 2], 0.25)
        return loss, before, row.sum() + whole.sum()

    return step


def writes_to_a_row_after_a_cut(run: Run) -> Any:
    def step(x: Tensor, y: Tensor) -> Any:
        row = run.model[2].weight.detach()[1]
        size = row.norm().item()
        row.mul_(0.9)
        return plain(run)(x, y), size

    return step


def a_loss_of_detached_values_between(run: Run) -> Any:
    """As in SAC: the first backward pass does not go through what it detaches."""
    run.state.losses = []
    scale = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    other = torch.optim.Adam([scale], 0.1)
    run.optimizers.append(other)

    def step(x: Tensor, y: Tensor) -> Tensor:
        scores = run.model(x).log_softmax(-1)
        first = -(scale * (scores.amax(-1) + 0.5).detach()).mean()
        run.state.losses.append(first.item())
        other.zero_grad()
        first.backward()
        other.step()
        second = (scale - x.mean()).square().mean()
        run.state.losses.append(second.item())
        second.backward()
        other.step()
        run.state.losses.append(scale.item())  # of all histories that of the scores is left
        loss = F.nll_loss(scores, y)
        run.optimizer.zero_grad()
        loss.backward()
        run.optimizer.step()
        return loss

    return step


def saves_elsewhere(run: Run) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss

    return step


def detects_anomalies(run: Run) -> Any:
    inner = plain(run)

    def step(x: Tensor, y: Tensor) -> Any:
        with torch.autograd.set_detect_anomaly(True):
            return inner(x, y)

    return step


EAGER: list[Callable[[Run], Any]] = [saves_elsewhere, detects_anomalies]


@pytest.mark.parametrize("loop", EAGER, ids=lambda f: f.__name__)
def test_what_no_program_holds_runs_in_eager(loop: Callable[[Run], Any]) -> None:
    step = assert_equal(Case(loop, eager=True))
    assert len(step.refusals) == 1


@pytest.mark.parametrize("loop", EAGER, ids=lambda f: f.__name__)
def test_or_it_raises_with_the_line(loop: Callable[[Run], Any]) -> None:
    model = network()
    run = Run(model, torch.optim.SGD(model.parameters(), 0.1))
    step = compile_step(
        loop(run), model=model, optimizer=run.optimizer, backend="aot_eager", python="replay"
    )
    with pytest.raises(StepCaptureError, match=r"the step .* at .*\.py:\d+"):
        step(*batches(0, torch.Generator().manual_seed(0)))


def test_views_of_weights_that_a_cut_leaves():
    assert_equal(Case(views_of_weights_after_a_cut))


def test_a_part_of_a_weight_that_a_cut_leaves_is_written_to_in_eager():
    assert_equal(Case(writes_to_a_row_after_a_cut, eager=True))


def test_a_backward_pass_leaves_the_history_behind_detached_values():
    step = assert_equal(Case(a_loss_of_detached_values_between))
    assert step.compilations == 4, "three values are computed alone; the step is one program"


def test_an_argument_may_be_a_view_of_a_weight_at_some_calls():
    runs = [Run(network(), None) for _ in range(2)]
    runs[1].model.load_state_dict(runs[0].model.state_dict())
    found: list[list[Any]] = [[], []]
    for run, results, backend in zip(runs, found, (None, "aot_eager"), strict=True):
        optimizer = torch.optim.SGD(run.model.parameters(), 0.1)

        def step(x: Tensor, row: Tensor, run: Run = run, optimizer: Any = optimizer) -> Tensor:
            loss = run.model(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return row * 2 + loss  # after the step: a view has the new contents

        function: Any = step
        if backend is not None:
            function = compile_step(
                step, model=run.model, optimizer=optimizer, backend=backend, python="replay"
            )
        weight, other = run.model[2].weight, torch.ones(6, dtype=torch.float64)
        x = torch.ones(2, 4, dtype=torch.float64)
        for i in range(9):
            row = (other, weight.detach()[0], weight.detach()[2], run.model[0].bias.detach())[i % 4]
            results.append(function(x, row).detach().clone())
    compare("results", found[1], found[0])


def test_a_value_read_after_the_update_makes_no_second_program() -> None:
    step = assert_equal(Case(reads_the_loss))
    assert (step.compilations, step.cuts) == (1, 1)


def test_a_value_read_before_the_backward_pass_is_computed_alone() -> None:
    step = assert_equal(Case(skips_by_value, most_eager=6))
    assert step.cuts == 2


def _trained(function_of: Callable[[Run], Any], compiled: bool) -> tuple[Run, Any]:
    torch.manual_seed(0)
    model = network()
    run = Run(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    function = function_of(run)
    if not compiled:
        return run, function
    return run, compile_step(
        function, model=model, optimizer=run.optimizer, backend="aot_eager", python="replay"
    )


class _Refused(Exception):
    """Of the user's code."""


def _raising(run: Run) -> Any:
    run.state.n, run.state.kept = 0, []

    def step(x: Tensor, y: Tensor) -> Tensor:
        run.state.n += 1
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        run.state.kept.append(loss)
        if run.state.n == 4:
            raise _Refused("no")
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss

    return step


def test_an_exception_arrives_as_itself_and_nothing_has_changed() -> None:
    run, step = _trained(_raising, compiled=True)
    generator = torch.Generator().manual_seed(0)
    for i in range(3):
        step(*batches(i, generator))
    before = copied([run.model.state_dict(), run.optimizer.state_dict()])
    with pytest.raises(_Refused, match="no"):
        step(*batches(3, generator))
    assert all(p.grad is None for p in run.model.parameters())
    compare("left", copied([run.model.state_dict(), run.optimizer.state_dict()]), before)
    with pytest.raises(StepCaptureError, match="failed"):
        run.state.kept[-1] + 1
    step(*batches(4, generator))
    assert step.eager_steps == 1, step.divergences


def test_an_interruption_leaves_a_state_that_eager_could_have() -> None:
    """Raises at the n-th call of a function, for many n: the state is that before or after a step.

    Python runs the handlers of signals where functions begin, and not between any two of its
    instructions; there, locks of C that are held in `with` are released.
    """
    generator = torch.Generator().manual_seed(0)
    batch = batches(0, generator)
    run, step = _trained(plain, compiled=True)
    for _ in range(3):
        step(*batch)
    seen, n = {True}, 5
    while False not in seen:
        n = n * 9 // 8 + 1
        states = [copied([run.model.state_dict(), run.optimizer.state_dict()])]
        reference, eager = _trained(plain, compiled=False)
        reference.model.load_state_dict(run.model.state_dict())
        reference.optimizer.load_state_dict(copied(run.optimizer.state_dict()))
        eager(*batch)
        states.append(copied([reference.model.state_dict(), reference.optimizer.state_dict()]))
        seen.add(_interrupted(step, batch, n))
        found = copied([run.model.state_dict(), run.optimizer.state_dict()])
        errors = []
        for state in states:
            try:
                compare("state", found, state)
            except AssertionError as error:
                errors.append(error)
        assert len(errors) < len(states), (n, errors)
        assert all(p.grad is None for p in run.model.parameters())
    assert n > 100


def _interrupted(step: Any, batch: Any, count: int) -> bool:
    """Calls a step and interrupts it where a function begins; whether it was."""
    import sys

    left = [count]

    def trace(frame: FrameType, event: str, _: Any) -> None:
        left[0] -= event == "call"
        if left[0] == 0:
            raise KeyboardInterrupt

    sys.settrace(trace)
    try:
        step(*batch)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def _signalling(run: Run) -> Any:
    run.state.n = 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        run.state.n += 1
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        run.optimizer.step()
        if run.state.n == 3:
            signal.raise_signal(signal.SIGINT)
        run.optimizer.zero_grad()
        return loss

    return step


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Where a shell has started the tests in the background, SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_a_signal_in_a_step_leaves_the_state_before_it() -> None:
    run, step = _trained(_signalling, compiled=True)
    reference, eager = _trained(plain, compiled=False)
    batch = batches(0, torch.Generator().manual_seed(0))
    for _ in range(2):
        step(*batch)
    with pytest.raises(KeyboardInterrupt):
        step(*batch)
    step(*batch)
    for _ in range(3):
        eager(*batch)
    compare("model", copied(run.model.state_dict()), copied(reference.model.state_dict()))


def test_threads_take_steps_in_turn() -> None:
    run, step = _trained(plain, compiled=True)
    reference, eager = _trained(plain, compiled=False)
    batch = batches(0, torch.Generator().manual_seed(0))
    threads = [threading.Thread(target=lambda: [step(*batch) for _ in range(5)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(20):
        eager(*batch)
    compare("model", copied(run.model.state_dict()), copied(reference.model.state_dict()))


def test_another_thread_is_not_followed() -> None:
    run, step = _trained(_threaded, compiled=True)
    reference, eager = _trained(_threaded, compiled=False)
    generator = torch.Generator().manual_seed(0)
    for i in range(4):
        batch = batches(i, generator)
        compare("loss", copied(step(*batch)), copied(eager(*batch)))
    compare("seen", copied(run.state.seen), copied(reference.state.seen))


def _threaded(run: Run) -> Any:
    run.state.seen = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: run.state.seen.append(x.sum().item()))
        thread.start()
        thread.join()
        return plain(run)(x, y)

    return step


def test_nothing_is_left_on_torch_and_the_optimizer() -> None:
    def patched() -> Any:
        return (
            vars(torch.autograd.Function)["apply"], torch.manual_seed, torch.get_rng_state,
            F.handle_torch_function, vars(torch._tensor)["handle_torch_function"],
            list(gc.callbacks),
        )  # fmt: skip

    before = patched()
    run, step = _trained(plain, compiled=True)
    for _ in range(3):
        step(*batches(0, torch.Generator().manual_seed(0)))
    assert before == patched()
    assert not {"step", "zero_grad"} & vars(run.optimizer).keys()


def test_dtypes_that_eager_refuses_are_refused() -> None:
    run, step = _trained(plain, compiled=True)
    generator = torch.Generator().manual_seed(0)
    for i in range(3):
        x, y = batches(i, generator)
        step(x, y)
    with pytest.raises(RuntimeError, match="same dtype"):
        step(x.float(), y)
    with pytest.raises(IndexError, match="Target 7 is out of bounds"):
        step(x, y.fill_(7))
    assert all(p.isfinite().all() for p in run.model.parameters())


def test_its_option_is_checked() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(OptionError, match="python must be"):
        compile_step(
            lambda x: x, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1),
            python="once",
        )  # fmt: skip


def test_schedulers_do_not_warn() -> None:
    def scheduled(run: Run) -> Any:
        scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 2)

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = plain(run)(x, y)
            scheduler.step()
            return loss

        return step

    run, step = _trained(scheduled, compiled=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(4):
            step(*batches(i, torch.Generator().manual_seed(i)))
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


class _Finalized:
    """Calls torch when it is collected, as wrappers of tensors may."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        torch.ones(2).detach()


def _collecting(run: Run) -> Any:
    run.state.n = 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        run.state.n += 1
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        if run.state.n == 1:
            _Finalized()
            gc.collect()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss.detach()

    return step


def test_finalizers_are_no_part_of_a_step() -> None:
    step = _trained(_collecting, compiled=True)[1]
    generator = torch.Generator().manual_seed(0)
    for i in range(3):
        step(*batches(i, generator))
    assert step.eager_steps == 1, step.divergences

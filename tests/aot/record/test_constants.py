"""What Python reads of tensors that are the same in all calls, and what it does behind a cut."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import swa_utils

from dynamo_backends.aot.step.program import step_programs as steps
from dynamo_backends.aot.step.record.trie import Trie
from tests.aot.record.checks import Case, Run, assert_equal

Read = Callable[[Run, Tensor], Any]


def _positions(run: Run, x: Tensor) -> Any:
    return bool((torch.arange(x.shape[0]).diff() == 1).all())


def _of_a_view_written_to(run: Run, x: Tensor) -> Any:
    mask = torch.ones(4, dtype=torch.bool)
    mask[1:].logical_not_()
    return mask.sum().item()


def _in_text(run: Run, x: Tensor) -> Any:
    return len(str(torch.eye(2)))


def _of_no_rows(run: Run, x: Tensor) -> Any:
    """torch 2.11 takes no rows apart for a Jacobian by one argument."""
    return len(x.cumsum(0)[:0].neg().unbind())


def _of_zeros_like_an_input(run: Run, x: Tensor) -> Any:
    return torch.zeros_like(x).sum().item()


def _of_an_input(run: Run, x: Tensor) -> Any:
    return (x > 0.5).sum().item()


def _of_an_input_in_a_view(run: Run, x: Tensor) -> Any:
    table = torch.zeros(6, dtype=x.dtype)
    table[1:5].add_(x[0])
    return int(table.sum() > 0)


def _of_a_weight(run: Run, x: Tensor) -> Any:
    return int(next(run.model.parameters()).sum() > 0)


def _of_a_number(run: Run, x: Tensor) -> Any:
    return int((torch.ones(3) * run.state.scale).sum() > 4)


def _of_a_draw(run: Run, x: Tensor) -> Any:
    return int(torch.rand(()) > 0.5)


CONSTANT = [_positions, _of_a_view_written_to, _in_text, _of_no_rows]
VARYING = [
    _of_zeros_like_an_input, _of_an_input, _of_an_input_in_a_view, _of_a_weight, _of_a_number,
    _of_a_draw,
]  # fmt: skip


def _loop(read: Read, where: str) -> Any:
    def make(run: Run) -> Any:
        run.state.seen, run.state.scale = [], 1.0

        def between(i: int) -> None:
            run.state.scale = 1.0 + 0.25 * i

        def step(x: Tensor, y: Tensor) -> Tensor:
            if where == "first":
                run.state.seen.append(read(run, x))
            loss = F.cross_entropy(run.model(x), y)
            if where == "middle":
                run.state.seen.append(read(run, x))
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            if where == "last":
                run.state.seen.append(read(run, x))
            return loss * (1 + run.state.seen[-1])

        run.between = between
        return step

    return make


@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.parametrize("read", CONSTANT, ids=lambda f: f.__name__.strip("_"))
def test_constants_that_python_reads_cut_nothing(read: Read, where: str) -> None:
    step = assert_equal(Case(_loop(read, where), most_eager=1))
    assert (step.launches, step.compilations, step.cuts) == (5, 1, 0)


@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.parametrize("read", VARYING, ids=lambda f: f.__name__.strip("_"))
def test_what_follows_from_a_step_is_read_at_each_call(read: Read, where: str) -> None:
    step = assert_equal(Case(_loop(read, where), steps=8, most_eager=3))
    assert step.launches > 0


def _history_before_a_cut(use: Callable[[Tensor], Tensor]) -> Any:
    def make(run: Run) -> Any:
        run.state.seen = []

        def step(x: Tensor, y: Tensor) -> Tensor:
            out = run.model(x)
            loss = F.cross_entropy(out, y)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.state.seen.append(next(run.model.parameters()).sum().item())
            return use(loss) + use(out.t()).sum()

        return step

    return make


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t.detach(),
        lambda t: 2 * t,
        lambda t: t.detach().add_(1),
        lambda t: t.detach().clone().sqrt() + t,
    ],
)
def test_tensors_of_before_a_cut_are_used_behind_it(use: Any) -> None:
    step = assert_equal(Case(_history_before_a_cut(use), most_eager=1))
    assert (step.launches, step.cuts) == (10, 1)


def _averaging(run: Run) -> Any:
    average = swa_utils.AveragedModel(run.model)

    def between(i: int) -> None:
        run.state.averages = [t.clone() for t in average.state_dict().values()]

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        average.update_parameters(run.model)
        return loss.detach()

    run.between = between
    return step


def test_averages_of_weights_are_read_behind_the_update() -> None:
    step = assert_equal(Case(_averaging, most_eager=2))
    assert step.launches >= 8


def test_programs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "MAX_VARIANTS", 2)
    rows = (3, 3, 4, 4, 5, 5, 3, 4, 3)

    def make(run: Run) -> Any:
        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(run.model(x), y)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            return loss

        return step

    def batch(i: int, generator: torch.Generator) -> tuple[Any, ...]:
        x = torch.randn(rows[i], 4, dtype=torch.float64, generator=generator)
        return x, torch.randint(0, 3, (rows[i],), generator=generator)

    step = assert_equal(Case(make, batch=batch, steps=len(rows)))
    assert len(step.reports) == 2
    assert (step.launches, step.compilations) == (6, 5)


def test_launches_of_programs_that_are_gone_count() -> None:
    def make(run: Run) -> Any:
        scale = 1.0
        new = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))

        def between(i: int) -> None:
            nonlocal scale
            scale = 1.0 + (i if i > 2 else 0)
            if i == 5:
                run.optimizer.add_param_group({"params": [new], "lr": 0.1})

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(run.model(x), y) * scale
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            return loss

        run.between = between
        return step

    step = assert_equal(Case(make, steps=10))
    assert step.compilations > 2
    assert step.launches == 10 - step.eager_steps


def test_the_batch_of_several_processes_is_no_constant() -> None:
    trie = Trie()
    trie.add_batch([torch.ones(2)])
    assert not trie.is_constant(trie.root, trie.batch)

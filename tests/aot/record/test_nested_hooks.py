"""Steps by replay: hooks on results and of modules, which run within a backward pass."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynamo_backends import compile_step
from tests.aot.record.checks import Case, Run, assert_equal, batches, network, update_by_gradients
from tests.aot.record.test_functions import Reversal, Swish
from tests.aot.record.test_training import clips, plain


def hooked(register: Any) -> Any:
    """A step with hooks on what its model computes."""

    def loop(run: Run) -> Any:
        run.state.log = []
        run.state.n = 0

        def step(x: Tensor, y: Tensor) -> Any:
            run.state.n += 1
            hidden = run.model[1](run.model[0](x))
            hidden = register(run, hidden)
            loss = F.cross_entropy(run.model[2](hidden), y)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            return loss

        return step

    return loop


def _looks(run: Run, hidden: Tensor) -> Tensor:
    hidden.register_hook(lambda g: run.state.log.append(g.norm()))
    return hidden


def _changes(run: Run, hidden: Tensor) -> Tensor:
    hidden.register_hook(lambda g: g * 2)
    hidden.register_hook(lambda g: run.state.log.append(g.clone()))
    hidden.register_hook(lambda g: g.clamp(-0.1, 0.1))
    return hidden


def _used_twice(run: Run, hidden: Tensor) -> Tensor:
    hidden.register_hook(lambda g: g.clamp(-0.05, 0.05))
    squared = hidden * hidden
    squared.register_hook(lambda g: run.state.log.append(g.sum()))
    total = squared + torch.sin(hidden) + hidden
    total.register_hook(lambda g: run.state.log.append(g.sum()))
    return total


def _written_to(run: Run, hidden: Tensor) -> Tensor:
    hidden = hidden * 2
    hidden.register_hook(lambda g: run.state.log.append(("before", g.sum())))
    hidden.add_(1).mul_(3)
    hidden.register_hook(lambda g: run.state.log.append(("after", g.sum())))
    return hidden


def _one_of_several(run: Run, hidden: Tensor) -> Tensor:
    first, second = hidden.split(3, dim=1)
    second.register_hook(lambda g: g * 0.5)
    first.register_hook(lambda g: run.state.log.append(g.sum()))
    return torch.cat([second, first], 1)


def _removed(run: Run, hidden: Tensor) -> Tensor:
    handle = hidden.register_hook(lambda g: g * 100)
    hidden.register_hook(lambda g: run.state.log.append(g.norm()))
    handle.remove()
    return hidden


def _with_leaves(run: Run, hidden: Tensor) -> Tensor:
    if run.state.n == 1:
        for name, p in run.model.named_parameters():
            p.register_hook(lambda g, name=name: run.state.log.append((name, g.sum())))
            p.register_post_accumulate_grad_hook(
                lambda p, name=name: run.state.log.append((name, "done", p.grad.sum()))
            )
    hidden = Swish.apply(hidden, 1.0)
    hidden.register_hook(lambda g: run.state.log.append(g.norm()))
    return hidden


def _holds_the_gradient(run: Run, hidden: Tensor) -> Tensor:
    hidden.register_hook(run.state.log.append)
    return hidden


def _counts(run: Run, hidden: Tensor) -> Tensor:
    def hook(g: Tensor) -> Tensor:
        run.state.log.append(len(run.state.log))
        return g * (1 + 0.1 * len(run.state.log))

    hidden.register_hook(hook)
    return hidden


def _reads(run: Run, hidden: Tensor) -> Tensor:
    hidden.register_hook(lambda g: run.state.log.append(f"{g.norm().item():.6f}"))
    return hidden


def _decides(run: Run, hidden: Tensor) -> Tensor:
    hidden.register_hook(lambda g: g * 0.5 if g.norm() > 0.28 else g + 0.01)
    return hidden


def _branches(run: Run, hidden: Tensor) -> Tensor:
    def hook(g: Tensor) -> Any:
        if run.state.n % 3 == 0:
            run.state.log.append(g.exp().sum())
            return g.sin()
        return None

    hidden.register_hook(hook)
    hidden = Reversal.apply(hidden, -0.5)
    hidden.register_hook(lambda g: run.state.log.append(g.norm()))
    return hidden


def _comes_and_goes(run: Run, hidden: Tensor) -> Tensor:
    if run.state.n % 2:
        hidden.register_hook(lambda g: g * 3)
    return hidden


def _goes_eager_in_the_pass(run: Run, hidden: Tensor) -> Tensor:
    def hook(g: Tensor) -> Tensor:
        torch.vmap(torch.sin)(g)
        return g * 2

    Swish.apply(hidden, 1.0).sum().register_hook(lambda g: g)
    hidden.register_hook(lambda g: run.state.log.append(g.norm()))
    hidden = Swish.apply(hidden * 2, 1.0)
    hidden.register_hook(hook)
    return hidden


def _goes_eager_before(run: Run, hidden: Tensor) -> Tensor:
    hidden.register_hook(lambda g: run.state.log.append(g.norm()))
    first, _ = torch.chunk(hidden * 2, 2, dim=1)
    hidden = hidden + Swish.apply(hidden, 1.0)
    first.register_hook(lambda g: g * 5)
    torch.vmap(torch.sin)(hidden)
    return hidden + first.sum()


def _catches(run: Run, hidden: Tensor) -> Tensor:
    def hook(g: Tensor) -> None:
        run.state.log.append(g.norm())
        raise KeyError("mine")

    again = hidden * 2
    again.register_hook(hook)
    try:
        again.sum().backward(retain_graph=True)
    except KeyError:
        run.state.log.append("caught")
    hidden = hidden + 1
    hidden.register_hook(lambda g: run.state.log.append(g.norm()))
    return hidden


def _queues_a_callback(run: Run, hidden: Tensor) -> Tensor:
    def hook(g: Tensor) -> None:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: run.state.log.append("end"))

    hidden.register_hook(hook)
    return hidden


def _asks_for_a_gradient(run: Run, hidden: Tensor) -> Tensor:
    """As Hugging Face does before checkpoints: it has one already."""
    return hidden.requires_grad_(True)


ONE_PROGRAM = (
    _asks_for_a_gradient,
    _looks, _changes, _used_twice, _written_to, _one_of_several, _removed, _with_leaves,
    _holds_the_gradient, _catches,
)  # fmt: skip

SEVERAL = (_counts, _reads, _decides, _branches, _comes_and_goes)

EAGER = (_goes_eager_in_the_pass, _goes_eager_before, _queues_a_callback)


@pytest.mark.parametrize("register", ONE_PROGRAM)
def test_hooks_on_results_are_part_of_one_program(register: Any) -> None:
    step = assert_equal(Case(hooked(register)))
    assert (step.compilations, step.cuts) == (1, 0)


@pytest.mark.parametrize("register", SEVERAL)
def test_hooks_on_results_that_differ(register: Any) -> None:
    assert_equal(Case(hooked(register), most_eager=4))


@pytest.mark.parametrize("register", EAGER)
def test_hooks_are_called_where_a_step_goes_on_in_eager(register: Any) -> None:
    assert_equal(Case(hooked(register), eager=True))


def full_hooks(run: Run) -> Any:
    run.state.log = []
    for i, module in enumerate(run.model):
        module.register_full_backward_pre_hook(
            lambda m, above, i=i: run.state.log.append((i, "pre", above[0].norm()))
        )
        module.register_full_backward_hook(
            lambda m, below, above, i=i: run.state.log.append(
                (i, below[0] is None or below[0].norm(), above[0].norm())
            )
        )
    return clips(run)


def full_hooks_change(run: Run) -> Any:
    run.model[2].register_full_backward_hook(lambda m, below, above: (below[0] * 3,))
    run.model[1].register_full_backward_pre_hook(lambda m, above: (above[0].clamp(-0.1, 0.1),))
    return plain(run)


def full_hook_of_all(run: Run) -> Any:
    run.state.log = []
    run.model.register_full_backward_hook(
        lambda m, below, above: run.state.log.append(above[0].norm())
    )
    run.model[1].register_full_backward_hook(
        lambda m, below, above: run.state.log.append(above[0].norm())
    )
    return plain(run)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("loop", [full_hooks, full_hooks_change, full_hook_of_all])
def test_hooks_of_modules_are_part_of_one_program(loop: Any) -> None:
    step = assert_equal(Case(loop))
    assert (step.compilations, step.cuts) == (1, 0)


def penalty(run: Run) -> Any:
    """Of the gradient with respect to the batch, through a function and a hook."""
    run.state.log = []

    def step(x: Tensor, y: Tensor) -> Any:
        x = x.requires_grad_()
        hidden = torch.tanh(run.model[0](x))
        hidden.register_hook(lambda g: run.state.log.append(g.detach().norm()))
        out = run.model[2](hidden * 2)
        loss = F.cross_entropy(out, y)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + 0.1 * gradient.square().sum()).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss, gradient

    return step


class Cube(torch.autograd.Function):
    """Has a second derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x * x


def penalty_of_functions(run: Run) -> Any:
    def step(x: Tensor, y: Tensor) -> Any:
        x = x.detach().requires_grad_()
        loss = F.cross_entropy(run.model[2](Cube.apply(run.model[0](x))), y)
        gradients = torch.autograd.grad([loss], [x], create_graph=True)
        (loss + gradients[0].norm()).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss, gradients[0]

    return step


def with_create_graph(run: Run) -> Any:
    run.model[0].weight.register_hook(lambda g: g * 0.5)

    def step(x: Tensor, y: Tensor) -> Any:
        loss = F.cross_entropy(run.model(x), y)
        loss.backward(create_graph=True)
        norm = sum(p.grad.square().sum() for p in run.model.parameters())
        for p in run.model.parameters():
            p.grad = None
        (loss + 0.1 * norm).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss

    return step


def of_some_inputs(run: Run) -> Any:
    run.state.log = []
    run.model[0].weight.register_hook(lambda g: g * 0.5)
    run.model[2].weight.register_hook(lambda g: run.state.log.append(g.norm()))

    def step(x: Tensor, y: Tensor) -> Any:
        loss = F.cross_entropy(run.model(x), y)
        loss.backward(inputs=[run.model[0].weight, run.model[0].bias])
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss

    return step


def gradients_of_hooked_leaves(run: Run) -> Any:
    run.state.log = []
    run.model[0].weight.register_hook(lambda g: g * 0.5)
    run.model[0].weight.register_post_accumulate_grad_hook(lambda p: run.state.log.append(1))

    def step(x: Tensor, y: Tensor) -> Any:
        return update_by_gradients(run, F.cross_entropy(run.model(x), y))

    return step


def retained(run: Run) -> Any:
    run.state.log = []

    def step(x: Tensor, y: Tensor) -> Any:
        out = Swish.apply(run.model(x), 1.0)
        out.register_hook(lambda g: run.state.log.append(g.norm()))
        first, second = F.cross_entropy(out, y), out.square().mean()
        first.backward(retain_graph=True)
        torch.autograd.backward([second], [torch.tensor(0.5, dtype=out.dtype)])
        run.optimizer.step()
        run.optimizer.zero_grad()
        return first, second

    return step


PASSES = (
    penalty, penalty_of_functions, with_create_graph, of_some_inputs, gradients_of_hooked_leaves,
    retained,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("loop", PASSES)
def test_passes_of_all_kinds(loop: Any) -> None:
    step = assert_equal(Case(loop))
    assert (step.compilations, step.cuts) == (1, 0)


def _of_function(run: Run, fails: Any) -> Any:
    class Fails(Swish):
        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            fails()
            return Swish.backward(ctx, gradient)

    return lambda x, y: plain(run)(Fails.apply(x.requires_grad_(), 1.0), y)


def _of_hook(run: Run, fails: Any) -> Any:
    def step(x: Tensor, y: Tensor) -> Any:
        out = run.model(x)
        out.register_hook(lambda g: fails())
        F.cross_entropy(out, y).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()

    return step


def _of_module(run: Run, fails: Any) -> Any:
    run.model[1].register_full_backward_hook(lambda m, below, above: fails())
    return plain(run)


@pytest.mark.parametrize("loop", [_of_function, _of_hook, _of_module])
@pytest.mark.parametrize("call", [1, 3])
def test_an_exception_in_a_backward_pass_leaves_the_state_as_it_was(loop: Any, call: int) -> None:
    torch.manual_seed(0)
    model: Any = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    is_bad = [False]

    def fails() -> None:
        if is_bad[0]:
            raise KeyError("mine")

    step = compile_step(
        loop(Run(model, optimizer), fails), model=model, optimizer=optimizer, backend="aot_eager",
        python="replay",
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for _ in range(call):
        step(*batches(0, generator))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    is_bad[0] = True
    with pytest.raises(KeyError, match="mine"):
        step(*batches(0, generator))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    is_bad[0] = False
    step(*batches(0, generator))
    assert not torch.equal(model[0].weight, before["0.weight"])


def test_a_second_pass_raises_as_in_eager() -> None:
    for of_function in (False, True):
        model = nn.Linear(4, 2)

        def train(x: Tensor, model: Any = model, of_function: bool = of_function) -> None:
            out = Cube.apply(model(x)) if of_function else model(x).exp()
            out.register_hook(lambda g: None)
            loss = out.sum()
            loss.backward()
            loss.backward()

        step = compile_step(train, model=model, optimizer=[], backend="aot_eager", python="replay")
        with pytest.raises(RuntimeError, match="a second time"):
            step(torch.ones(3, 4))

"""Steps by replay: transforms of `torch.func`, whose functions run at every call."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import (
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)

from dynamo_backends import StepCaptureError, compile_step
from tests.aot.record.checks import Case, Run, assert_equal, batches, compare, copied, momentum

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # vmap calls it

Loss = Callable[[Run, Tensor, Tensor], Tensor]


def training(loss_of: Loss) -> Callable[[Run], Callable[..., Any]]:
    """A loop whose step trains by a loss; the state has the number of the step."""

    def loop(run: Run) -> Callable[..., Any]:
        run.state.step, run.state.log = 0, []

        def step(x: Tensor, y: Tensor) -> Tensor:
            run.state.step += 1
            loss = loss_of(run, x, y)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            return loss

        return step

    loop.__name__ = loss_of.__name__
    return loop


def entropy(run: Run, x: Tensor, y: Tensor) -> Tensor:
    """The loss of the model."""
    return F.cross_entropy(run.model(x), y)


def gradient_penalty(run: Run, x: Tensor, y: Tensor) -> Tensor:
    g = grad(lambda x: run.model(x).square().sum())(x)
    return entropy(run, x, y) + 0.1 * g.square().sum()


def numbers(run: Run, x: Tensor, y: Tensor) -> Tensor:
    """Numbers that change in the function, in its closure and around the transform."""
    scale = 1 + run.state.step / 3

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        run.state.log.append(f"{run.state.step}: {tuple(x.shape)}")
        return F.cross_entropy(run.model(x[None]) * scale, y[None]) / run.state.step

    g, values = vmap(grad_and_value(loss_of))(x, y)
    return values.mean() + g.square().mean() * run.state.step


def learning_to_learn(run: Run, x: Tensor, y: Tensor) -> Tensor:
    """MAML: two inner steps, the rate of which changes."""

    def inner(p: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(run.model, p, (x,)), y)

    parameters = dict(run.model.named_parameters())
    for _ in range(2):
        g = grad(inner)(parameters, x, y)
        rate = 0.1 / run.state.step
        parameters = {name: p - rate * g[name] for name, p in parameters.items()}
    return inner(parameters, x, y)


def tangents(run: Run, x: Tensor, y: Tensor) -> Tensor:
    out, tangent = jvp(lambda x: run.model(x).tanh(), (x,), (torch.ones_like(x),))
    return F.cross_entropy(out, y) + tangent.square().mean()


def products(run: Run, x: Tensor, y: Tensor) -> Tensor:
    out, pullback, rows = vjp(lambda x: (run.model(x).tanh(), x + 1), x, has_aux=True)
    (g,) = pullback(torch.ones_like(out))
    (h,) = pullback(out.detach())
    return F.cross_entropy(out, y) + (g * h).square().mean() + rows.mean()


def jacobians(run: Run, x: Tensor, y: Tensor) -> Tensor:
    rows = vmap(jacrev(run.model))(x)
    columns = vmap(jacfwd(run.model))(x)
    second = hessian(lambda x: run.model(x).sum())(x)
    third = jacrev(run.model, chunk_size=2)(x[0])
    squares = second.square().mean() + third.square().mean()
    return entropy(run, x, y) + rows.square().mean() + columns.abs().mean() + squares


def functional_jacobians(run: Run, x: Tensor, y: Tensor) -> Tensor:
    j = torch.autograd.functional.jacobian(
        lambda x: run.model(x).sum(0), x, vectorize=True, create_graph=True
    )
    return entropy(run, x, y) + j.square().mean()


def draws(run: Run, x: Tensor, y: Tensor) -> Tensor:
    noisy = lambda x: F.dropout(run.model(x), 0.3) + torch.randn(3)  # noqa: E731
    different = vmap(noisy, randomness="different", chunk_size=2)(x)
    same = vmap(noisy, randomness="same")(x)
    return F.cross_entropy(different, y) + same.square().mean()


def writes(run: Run, x: Tensor, y: Tensor) -> Tensor:
    """In-place operators, and those that change a shape, on results and on what is captured."""
    captured = x * 2

    def of_row(x: Tensor) -> Tensor:
        z = x.sin()
        z.unsqueeze_(0).mul_(3).squeeze_(0)
        z[:2] += 1
        return run.model(z).squeeze() + captured.sum()

    out = vmap(of_row)(x)
    captured.unsqueeze_(0)
    return F.cross_entropy(out, y) + captured.mean() * captured.dim()


def under_autocast(run: Run, x: Tensor, y: Tensor) -> Tensor:
    x = x.float()
    with torch.autocast("cpu", torch.bfloat16):
        g = grad(lambda w: F.linear(x, w).square().sum())(run.model[0].weight.float())
    return entropy(run, x.double(), y) + g.square().mean()


def without_gradients(run: Run, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        outside = grad(lambda x: run.model(x).square().sum())(x)

    def f(x: Tensor) -> Tensor:
        with torch.no_grad():
            h = run.model[0](x)
        return (run.model(x).sum() * h).sum()

    return entropy(run, x, y) + (outside + grad(f)(x)).square().mean()


class Square(torch.autograd.Function):
    """With another gradient than that of its forward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * x * 3


def functions(run: Run, x: Tensor, y: Tensor) -> Tensor:
    g = vmap(grad(lambda x: Square.apply(run.model(x)).sum()))(x)
    values = vmap(lambda x: Square.apply(run.model(x)).sum())(x)
    return entropy(run, x, y) + g.square().mean() + values.mean()


def logs_inside(run: Run, x: Tensor, y: Tensor) -> Tensor:
    """What the function leaves in Python is an ordinary tensor behind the step."""

    def f(x: Tensor) -> Tensor:
        out = run.model(x).square()
        run.state.log.append(out.detach())
        return out.sum()

    return entropy(run, x, y) + grad(f)(x).square().mean()


ONE_PROGRAM: dict[str, Loss] = {
    f.__name__: f
    for f in (
        gradient_penalty, numbers, learning_to_learn, tangents, products, jacobians,
        functional_jacobians, draws, writes, under_autocast, without_gradients, functions,
        logs_inside,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_PROGRAM)
def test_transforms_are_part_of_one_program(name: str) -> None:
    step = assert_equal(Case(training(ONE_PROGRAM[name])))
    assert step.eager_steps <= (2 if name == "draws" else 1)  # copies of what was drawn, in C++
    assert (step.launches, step.eager_steps) == (6 - step.eager_steps, step.eager_steps)
    assert step.compilations <= 4  # numbers become inputs


@pytest.mark.parametrize("backend", ["openxla", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["numbers", "learning_to_learn", "tangents"])
def test_transforms_on_other_backends(name: str, backend: str) -> None:
    assert_equal(Case(training(ONE_PROGRAM[name])), backend)


def private_gradients(run: Run) -> Callable[..., Any]:
    """DP-SGD: gradients per sample, clipped, with noise; the transform is made once."""
    run.state.bound = 1.0

    def loss_of(p: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(run.model, p, (x[None],)), y[None])

    per_sample = vmap(grad(loss_of), in_dims=(None, 0, 0))

    def step(x: Tensor, y: Tensor) -> Tensor:
        run.state.bound *= 0.9
        gradients = per_sample({n: p.detach() for n, p in run.model.named_parameters()}, x, y)
        flat = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()])
        norms = flat.norm(dim=0)
        weights = (run.state.bound / (norms + 1e-6)).clamp(max=1)
        for name, p in run.model.named_parameters():
            clipped = torch.einsum("i,i...", weights, gradients[name])
            p.grad = (clipped + 0.1 * torch.randn_like(p)) / len(x)
        run.optimizer.step()
        run.optimizer.zero_grad()
        return norms

    return step


def ensemble(run: Run) -> Callable[..., Any]:
    """Three models trained at once."""
    models = [copy.deepcopy(run.model) for _ in range(3)]
    stacked, _ = stack_module_state(models)
    names = {name: name.replace(".", "_") for name in stacked}
    run.model = nn.ParameterDict({names[n]: nn.Parameter(p.detach()) for n, p in stacked.items()})
    run.optimizer = momentum(run.model.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        parameters = {n: run.model[own] for n, own in names.items()}
        call = lambda p: functional_call(models[0], p, (x,))  # noqa: E731
        losses = vmap(lambda p: F.cross_entropy(call(p), y))(parameters)
        losses.sum().backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return losses

    return step


@pytest.mark.parametrize("loop", [private_gradients, ensemble])
def test_loops_with_transforms(loop: Any) -> None:
    assert assert_equal(Case(loop)).eager_steps == 1


def ways(run: Run, x: Tensor, y: Tensor) -> Tensor:
    """Another way within the function, which tensors of before go into and come out of."""
    hidden = run.model[0](x)

    def f(x: Tensor) -> Any:
        value = run.model(x) + hidden.sum()
        value = value.tanh() if run.state.step % 3 == 0 else value.sigmoid()
        return value.square().sum(), (hidden, value)

    g, (value, (same, inner)) = grad_and_value(f, has_aux=True)(x)
    run.state.log += [same, inner.detach()]
    return entropy(run, x, y) + g.square().mean() + (hidden + same).mean() + value + inner.mean()


def ways_of_rows(run: Run, x: Tensor, y: Tensor) -> Tensor:
    def f(x: Tensor) -> Tensor:
        out = run.model(x)
        return out if run.state.step % 2 else out.flip(0)

    return F.cross_entropy(vmap(f)(x), y)


def exceptions(run: Run, x: Tensor, y: Tensor) -> Tensor:
    def f(x: Tensor) -> Tensor:
        out = run.model(x).square().sum()
        if run.state.step % 2 == 0:
            raise ValueError
        return out

    try:
        g = grad(f)(x)
    except ValueError:
        g = x
    return entropy(run, x, y) + g.square().mean()


def reads(run: Run, x: Tensor, y: Tensor) -> Tensor:
    def f(x: Tensor) -> Tensor:
        value = run.model(x).square().sum()
        run.state.log.append(value.item())
        return value * 2 if value > 3 else value

    g, value = grad_and_value(f)(x)
    run.state.log.append(value.item())
    return entropy(run, x, y) + g.square().mean()


def reads_before_a_product(run: Run, x: Tensor, y: Tensor) -> Tensor:
    """A cut, or another way, between a call of `vjp` and that of its function."""
    hidden = run.model[0](x)
    out, pullback = vjp(lambda x: (run.model(x) + hidden.sum()).tanh(), x)
    run.state.log.append(out.sum().item())
    if run.state.step % 3 == 0:
        out = out * 2
    (g,) = pullback(torch.ones_like(out))
    return F.cross_entropy(out, y) + g.square().mean() + hidden.mean()


@pytest.mark.parametrize("loss_of", [ways, ways_of_rows, exceptions, reads, reads_before_a_product])
def test_functions_that_differ(loss_of: Loss) -> None:
    step = assert_equal(Case(training(loss_of), steps=8))
    assert step.launches >= 5


def seeds(run: Run, x: Tensor, y: Tensor) -> Tensor:
    def f(x: Tensor) -> Tensor:
        noise = torch.rand(3)
        torch.manual_seed(run.state.step)
        return (run.model(x) * (noise + torch.rand(3))).sum()

    return entropy(run, x, y) + grad(f)(x).square().mean()


def prints(run: Run, x: Tensor, y: Tensor) -> Tensor:
    def f(x: Tensor) -> Tensor:
        value = run.model(x).sum()
        run.state.log.append(str(value))
        return value

    return entropy(run, x, y) + grad(f)(x).square().mean()


def linearizes(run: Run, x: Tensor, y: Tensor) -> Tensor:
    out, pushforward = linearize(lambda x: run.model(x).tanh(), x)
    return F.cross_entropy(out, y) + pushforward(torch.ones_like(x)).detach().mean()


def functionalizes(run: Run, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(functionalize(lambda x: run.model(x).tanh())(x), y)


def dual_tensors(run: Run, x: Tensor, y: Tensor) -> Tensor:
    with forward_ad.dual_level():
        out = run.model(forward_ad.make_dual(x, torch.ones_like(x)))
        primal, tangent = forward_ad.unpack_dual(out)
    return F.cross_entropy(primal, y) + tangent.square().mean()


REFUSED = (seeds, prints, linearizes, functionalizes, dual_tensors)


@pytest.mark.parametrize("loss_of", REFUSED)
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
def test_others_run_in_eager(loss_of: Loss) -> None:
    assert assert_equal(Case(training(loss_of), eager=True)).refusals


def test_or_they_raise_with_the_line() -> None:
    case = Case(training(seeds))
    torch.manual_seed(0)
    run = Run(case.model(), None)
    run.optimizer = case.optimizer(run.model.parameters())
    step = compile_step(
        case.loop(run), model=run.model, optimizer=run.optimizer, backend="aot_eager",
        fallback="error",
    )  # fmt: skip
    text = r"torch\.manual_seed inside a torch\.func transform at .*test_transforms\.py"
    with pytest.raises(StepCaptureError, match=text):
        step(*batches(0, torch.Generator().manual_seed(0)))


def test_a_product_outlives_its_step() -> None:
    """The function that `vjp` returns is called behind the step."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()

    def function(x: Tensor) -> Any:
        hidden = x * 2
        out, pullback = vjp(lambda x: (model(x) + hidden.sum()).tanh(), x)
        return out, pullback

    step = compile_step(function, model=model, optimizer=[], backend="aot_eager")
    for i in range(4):
        x, _ = batches(i, torch.Generator().manual_seed(i))
        (found, pullback), (expected, reference) = step(x), function(x)
        compare("result", copied(found), copied(expected))
        given = torch.ones_like(expected)
        compare("product", copied(pullback(given)), copied(reference(given)))
    assert (step.eager_steps, step.launches) == (1, 3)

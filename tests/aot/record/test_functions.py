"""Steps by replay: `autograd.Function` of the user's, whose forward and backward are Python."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tests.aot.record.checks import Case, Run, assert_equal
from tests.aot.record.test_training import clips, plain

LOG: list[Any] = []


class Swish(Function):
    """Saves its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, beta: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.beta = beta
        LOG.append("forward")
        return x * torch.sigmoid(beta * x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        LOG.append(("backward", gradient.sum(), ctx.needs_input_grad))
        s = torch.sigmoid(ctx.beta * x)
        return gradient * (s + ctx.beta * x * s * (1 - s)), None


class StraightThrough(Function):
    """Rounds, and passes gradients on."""

    @staticmethod
    def forward(x: Tensor, levels: int = 8) -> Tensor:
        return torch.round(x * levels) / levels

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.levels = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.clamp(-1, 1), None


class Reversal(Function):
    """Returns its argument itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -ctx.weight * gradient, None


class Product(Function):
    """Takes parameters, saves its result, and returns several."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        out = torch.exp(-(x @ weight.t() + bias).abs())
        order = out.argmax(1)
        ctx.mark_non_differentiable(order)
        ctx.save_for_backward(x, weight, out, torch.sign(x @ weight.t() + bias))
        return out, order, out.sum(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor, of_sum: Tensor) -> Any:
        x, weight, out, sign = ctx.saved_tensors
        below = -(gradient + of_sum[:, None]) * out * sign
        return (
            below @ weight if ctx.needs_input_grad[0] else None,
            below.t() @ x if ctx.needs_input_grad[1] else None,
            below.sum(0),
        )


class InPlace(Function):
    """Writes to its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.mul_(2)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class WithoutZeros(Function):
    """Gets None where no gradient arrives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> Any:
        LOG.append((first is None, second is None))
        return first * 2 if second is None else second * 3


def with_middle(middle: Any, after: Any = plain) -> Any:
    """A step whose model has something between its layers."""

    class Middle(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return middle(run_of[0], x)

    run_of: list[Run] = []

    def loop(run: Run) -> Any:
        run_of[:] = [run]
        LOG.clear()
        run.state.log = LOG
        run.state.n = 0
        run.model.insert(1, Middle())
        return after(run)

    return loop


def _counts(run: Run, x: Tensor) -> Tensor:
    run.state.n += 1
    return Swish.apply(x, 1.5)


def _float_changes(run: Run, x: Tensor) -> Tensor:
    run.state.n += 1
    return Reversal.apply(x, 0.1 * run.state.n)


def _several(run: Run, x: Tensor) -> Tensor:
    layer = run.model[-1]
    weight = torch.cat([layer.weight, layer.weight * 0.5])  # no ties
    out, order, total = Product.apply(x, weight, layer.bias.repeat(2))
    return out * total[:, None] + order[:, None].to(x)


def _chained(run: Run, x: Tensor) -> Tensor:
    return Swish.apply(x, 1.0) + 0.1 * Swish.apply(x * 2, 2.0) + StraightThrough.apply(x)


def _in_place_behind(run: Run, x: Tensor) -> Tensor:
    return F.relu(Swish.apply(x, 1.0).add_(0.1), inplace=True)


def _in_place(run: Run, x: Tensor) -> Tensor:
    return InPlace.apply(x + 1) + 0.5


def _unused(run: Run, x: Tensor) -> Tensor:
    return WithoutZeros.apply(x)[0]


def _without_gradients(run: Run, x: Tensor) -> Tensor:
    with torch.no_grad():
        offset = Swish.apply(x, 1.0)
    return x + offset + Swish.apply(torch.ones_like(x), 2.0)


def _hooked(run: Run, x: Tensor) -> Tensor:
    y = Swish.apply(x, 1.0)
    y.register_hook(lambda g: LOG.append(g.norm()))
    y.grad_fn.register_hook(lambda below, above: LOG.append((below[0].sum(), above[0].sum())))
    y.grad_fn.register_prehook(lambda above: (above[0] * 0.5,))
    return y


def _reads_in_backward(run: Run, x: Tensor) -> Tensor:
    class Reads(Swish):
        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            LOG.append(round(gradient.norm().item(), 9))
            return Swish.backward(ctx, gradient)

    return Reads.apply(x, 1.0)


def _branches_in_backward(run: Run, x: Tensor) -> Tensor:
    run.state.n += 1

    class Branches(Swish):
        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            if run.state.n % 3 == 0:
                gradient = gradient.clamp(-0.01, 0.01)
            return Swish.backward(ctx, gradient)

    return Branches.apply(x, 1.0)


def _draws(run: Run, x: Tensor) -> Tensor:
    class Draws(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.mask = torch.rand_like(x) > 0.3
            return x * ctx.mask

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * ctx.mask + 0.01 * torch.randn_like(gradient)

    return Draws.apply(F.dropout(x, 0.2))


MIDDLES = {
    f.__name__: f
    for f in (
        _counts, _several, _chained, _in_place_behind, _in_place, _unused, _without_gradients,
        _hooked, _draws,
    )
}  # fmt: skip


@pytest.mark.parametrize("after", [plain, clips])
@pytest.mark.parametrize("name", sorted(MIDDLES))
def test_a_step_with_functions_is_one_program(name: str, after: Any) -> None:
    step = assert_equal(Case(with_middle(MIDDLES[name], after)))
    assert (step.compilations, step.cuts) == (1, 0)


@pytest.mark.parametrize("middle", [_float_changes, _reads_in_backward, _branches_in_backward])
def test_functions_run_as_in_eager(middle: Any) -> None:
    assert_equal(Case(with_middle(middle), most_eager=4))

"""Writes are taken out of graphs: results and inputs are afterwards what they are in eager."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dynamo_backends import _torch_private as private
from dynamo_backends.aot.step.program.functionalization import Functionalization
from dynamo_backends.graph.checker import check
from dynamo_backends.graph.decomposition_tables import checked_decomposition_table
from dynamo_backends.graph.graph import Graph, Input, Role, eliminate_dead_calls
from dynamo_backends.graph.normalize import NORMALIZE, lift_constants
from dynamo_backends.graph.pass_sequence import PassSequence
from dynamo_backends.graph.properties import Property
from dynamo_backends.graph.shape_propagation import PROPAGATE
from dynamo_backends.interface.errors import StepCaptureError


def functional(function: Callable[..., Any], inputs: list[Tensor], rules: Any) -> Any:
    """A function's graph without writes, its constants, and which inputs it updates."""
    mode = private.FakeTensorMode()
    fakes = [mode.from_tensor(x, static_shapes=True) for x in inputs]
    with private.tracing_a_step(mode), torch.no_grad():
        module = private.make_fx(lambda *xs: list(function(*xs)), None)(*fakes)
    constants = list(lift_constants(module).values())
    for place, constant in zip(
        module.graph.find_nodes(op="placeholder")[len(inputs) :], constants, strict=True
    ):
        place.meta["val"] = mode.from_tensor(constant, static_shapes=True)
    made, updates = Functionalization(module, mode, rules)()
    constants += lift_constants(made).values()
    eliminate_dead_calls(made.graph)
    made.recompile()
    names = [place.name for place in made.graph.find_nodes(op="placeholder")]
    graph = Graph(made, "step", tuple(Input(name, Role.ACTIVATION) for name in names))
    PassSequence((PROPAGATE,), given=NORMALIZE.ensures)(graph)  # assertions
    check(graph, NORMALIZE.ensures | {Property.TYPED})
    return made, constants, updates


def assert_equal(function: Callable[..., Any], inputs: list[Tensor], rules: Any) -> None:
    """Compares a function with its graph without writes."""
    module, constants, updates = functional(function, inputs, rules)
    expected = [x.clone() for x in inputs]
    with torch.no_grad():
        torch.manual_seed(0)
        results = list(function(*expected))
        torch.manual_seed(0)
        found = list(module(*inputs, *constants))
    after = list(inputs)
    for output, place in updates.items():
        after[place] = found[output]
    results += expected
    found = [*found[len(updates) :], *after]
    assert len(found) == len(results)
    for a, b in zip(found, results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, equal_nan=True)


def rows(x: Tensor, y: Tensor) -> Any:
    first = x[0]
    x[1].add_(first)
    first.mul_(2)
    return x + y, first


def views_of_views(x: Tensor, y: Tensor) -> Any:
    part = x.t()[1:].unsqueeze(0)
    flat = x.view(-1)
    part[0, :, 1].copy_(y[0, :4])
    flat[2:5].fill_(7)
    return part * 1, flat.sum()


def pieces(x: Tensor, y: Tensor) -> Any:
    a, b = x.split(2)
    a.sub_(b)
    rest = y.unbind(1)
    rest[1].zero_()
    b.add_(rest[1].sum())
    return a.clone(), b, x.chunk(2)[1]


def of_itself(x: Tensor, y: Tensor) -> Any:
    x.mul_(x)
    x.add_(x.flip(0))
    y[0].add_(y[1])
    y.copy_(y.flip(1))
    return (x,)


def copies(x: Tensor, y: Tensor) -> Any:
    z = torch.zeros_like(x)
    z.copy_(y[0])
    z[:, 1:3] = 5
    z[z > 1] = -1.0
    z.clamp_(max=1).masked_fill_(y > 0, 0.5)
    x.index_add_(0, torch.tensor([0, 2]), y[:2])
    x.scatter_(1, torch.zeros(4, 1, dtype=torch.long), 3.0)
    return z, x


def shapes(x: Tensor, y: Tensor) -> Any:
    z = x * 2
    before = z[0]
    z.unsqueeze_(0).squeeze_(0).t_()
    z.add_(1)
    return z, before


def dtypes(x: Tensor, y: Tensor) -> Any:
    h = x.half()
    h.mul_(y)
    n = torch.ones(4, 5, dtype=torch.int64)
    n.add_(x > 0)
    n.mul_(3)
    return h, n, h.float() + n


def layouts(x: Tensor, y: Tensor) -> Any:
    z = x.t().contiguous().t()
    z.add_(y)
    w = torch.empty_like(x)
    w.copy_(z)
    w.mul_(z.t().contiguous().t())
    return z.view(4, 5), w.view(-1), z


def results_in_place(x: Tensor, y: Tensor) -> Any:
    out, mean = torch.empty_like(x), torch.empty(4)
    torch.add(x, y, out=out)
    torch.mean(out, 1, out=mean)
    torch._foreach_add_([x[0], x[1], y], [out[1], out[0], out])
    return out, mean, x


def norms(x: Tensor, y: Tensor) -> Any:
    running, variance = x.new_zeros(5), x.new_ones(5)
    z = F.batch_norm(x, running, variance, training=True, momentum=0.3)
    z = F.layer_norm(F.silu(z, inplace=True), (5,))
    return z, running, variance


def draws(x: Tensor, y: Tensor) -> Any:
    x[0].bernoulli_(0.5)
    y.normal_()
    F.dropout(x, 0.5, inplace=True)
    return (torch.rand(3).uniform_(),)


def nothing(x: Tensor, y: Tensor) -> Any:
    return x[0], y, torch.tensor(2.0) * x


def literals(x: Tensor, y: Tensor) -> Any:
    counter = torch.tensor(1.0)
    counter += 2
    counter.add_(x.sum())
    return counter, torch.tensor([1.0, 2.0]).mul_(counter)


def assertions(x: Tensor, y: Tensor) -> Any:
    z = x.exp()
    torch._assert_async((z >= 0).all(), "a power is negative")
    z.mul_(2)
    return z.index_add(0, torch.tensor([0, 1]), y[:2]), F.max_unpool2d(
        *F.max_pool2d(z[:, :4].reshape(1, 4, 4), 2, return_indices=True), (2, 2)
    )


def alike(x: Tensor, y: Tensor) -> Any:
    a, b, c = x * 1, y * 1, x * 1
    a.mul_(2)
    b.mul_(2)
    a.addcmul_(c, b)
    c.copy_(b)
    return F.gelu(a) + F.gelu(b), a, c


def complex_numbers(x: Tensor, y: Tensor) -> Any:
    z = torch.complex(x, y)
    torch.view_as_real(z)[..., 0].mul_(2)
    z.conj().imag.add_(1)
    return torch.view_as_real(z), z.real


RULES: dict[str, Any] = {"as they are": {}, "decomposed": None}
PROGRAMS = [
    rows, views_of_views, pieces, of_itself, copies, shapes, dtypes, layouts, results_in_place,
    norms, draws, nothing, literals, alike, assertions, complex_numbers,
]  # fmt: skip


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 5, generator=generator) for _ in range(2)]


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_writes_are_taken_out(program: Any, rules: str) -> None:
    table = checked_decomposition_table(()) if RULES[rules] is None else RULES[rules]
    assert_equal(program, tensors(), table)


VIEWS: list[Callable[[Tensor, random.Random], Tensor]] = [
    lambda t, r: t.t() if t.ndim == 2 else t,
    lambda t, r: t[r.randrange(len(t))] if t.ndim and len(t) else t,
    lambda t, r: t[r.randrange(2) :] if t.ndim and len(t) > 1 else t,
    lambda t, r: t.reshape(-1) if t.is_contiguous() else t,
    lambda t, r: t.unsqueeze(r.randrange(t.ndim + 1)) if t.ndim < 3 else t.squeeze(),
    lambda t, r: t.split(2)[-1] if t.ndim and len(t) > 2 else t,
    lambda t, r: t.diagonal() if t.ndim == 2 else t,
    lambda t, r: t.detach(),
    lambda t, r: t.flip(0).expand_as(t) if t.ndim else t,
]
WRITES: list[Callable[[Tensor, Tensor, random.Random], Any]] = [
    lambda t, s, r: t.add_(s.mean()),
    lambda t, s, r: t.mul_(0.5),
    lambda t, s, r: t.copy_(s if s.shape == t.shape else s.sum()),
    lambda t, s, r: t.zero_(),
    lambda t, s, r: t.lerp_(torch.ones_like(t), 0.25),
    lambda t, s, r: t.clamp_(-1, 1),
    lambda t, s, r: t.addcmul_(t, s.sum(), value=0.1),
    lambda t, s, r: torch.exp(t * 0.1, out=t) if t.is_contiguous() else t.neg_(),
]


def random_program(seed: int) -> Callable[..., Any]:
    def program(x: Tensor, y: Tensor) -> Any:
        choices = random.Random(seed)
        values = [x, y]
        for _ in range(14):
            t, s = choices.choice(values), choices.choice(values)
            kind = choices.randrange(4)
            if kind == 0:
                values.append(t * 2 + s.sum())
            elif kind == 1:
                choices.choice(WRITES)(t, s, choices)
            else:
                values.append(choices.choice(VIEWS)(t, choices))
        return [v.clone() for v in values[2:]]

    return program


@pytest.mark.parametrize("seed", range(24))
def test_random_programs(seed: int) -> None:
    assert_equal(
        random_program(seed), tensors(), checked_decomposition_table(()) if seed % 2 else {}
    )


def test_a_changed_shape_of_an_input_is_refused() -> None:
    def program(x: Tensor, y: Tensor) -> Any:
        return (x.t_() + 1,)

    with pytest.raises(StepCaptureError, match="changes the shape of an input in place"):
        functional(program, tensors(), {})


def test_equal_calls_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    count = []
    trace = Functionalization._make_trace

    def counting(self: Any, *args: Any) -> Any:
        count.append(args)
        return trace(self, *args)

    monkeypatch.setattr(Functionalization, "_make_trace", counting)

    def program(*xs: Tensor) -> Any:
        for x in xs[1:]:
            x.mul_(0.5).add_(xs[0])
        return xs

    functional(program, [torch.randn(3) for _ in range(50)], {})
    assert len(count) == 2

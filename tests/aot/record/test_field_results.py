"""Results of steps, arguments that share memory, and errors of eager.

These loops did not equal eager when a step was captured once. Each runs in eager and compiled, and
all that it leaves is compared: results, gradients, the model, the optimizer, Python's state and
random state. Most of its calls run programs.
"""

import collections
import dataclasses
import functools
import heapq
import queue
import random
import types
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dynamo_backends import compile_step
from tests.aot.record.checks import (
    STEPS,
    Case,
    Run,
    assert_equal,
    batches,
    copied,
    momentum,
    network,
    trains,
    update,
)

# Results: in any container, and whatever the step keeps.


@dataclasses.dataclass
class Output:
    """What a step returns."""

    loss: Tensor
    number: int = 3


class Pair(NamedTuple):
    """What a step returns."""

    loss: Tensor
    number: int


class Plain:
    """What a step returns."""

    def __init__(self, loss: Tensor) -> None:
        self.inner = {"values": [loss]}


class Boxed:
    """What a step returns, without a dict."""

    __slots__ = ("loss",)

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


def _lazy(loss: Tensor) -> Iterator[Tensor]:
    yield loss


def _closed(loss: Tensor) -> Callable[[], Tensor]:
    return lambda: loss


def _object_array(loss: Tensor) -> Any:
    array = numpy.empty(1, dtype=object)
    array[0] = loss
    return array


CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dataclass": (Output, lambda r: r.loss),
    "nested dataclass": (lambda v: Output(Output(v)), lambda r: r.loss.loss),  # type: ignore[arg-type]
    "namespace": (lambda v: SimpleNamespace(a=v), lambda r: r.a),
    "set": (lambda v: {v}, lambda r: next(iter(r))),
    "frozen set": (lambda v: {"k": frozenset([v])}, lambda r: next(iter(r["k"]))),
    "key": (lambda v: {v: 1}, lambda r: next(iter(r))),
    "named tuple": (lambda v: Pair(v, 1), lambda r: r.loss),
    "object": (Plain, lambda r: r.inner["values"][0]),
    "slots": (Boxed, lambda r: r.loss),
    "deque": (lambda v: collections.deque([v]), lambda r: r[0]),
    "default dict": (lambda v: collections.defaultdict(list, a=[v]), lambda r: r["a"][0]),
    "ordered dict": (lambda v: collections.OrderedDict(a=v), lambda r: r["a"]),
    "chain map": (lambda v: collections.ChainMap({"a": v}), lambda r: r["a"]),
    "mapping": (lambda v: types.MappingProxyType({"a": v}), lambda r: r["a"]),
    "generator": (_lazy, next),
    "iterator": (lambda v: iter([v]), next),
    "closure": (_closed, lambda r: r()),
    "partial": (lambda v: functools.partial(torch.clone, v), lambda r: r()),
    "bound method": (lambda v: v.clone, lambda r: r()),
    "object array": (_object_array, lambda r: r[0]),
    "parameter": (lambda v: nn.ParameterDict({"a": v.detach()}), lambda r: r["a"]),
    "exception": (lambda v: ValueError(v), lambda r: r.args[0]),
    "queue": (lambda v: (q := queue.Queue(), q.put(v))[0], lambda r: r.get()),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_results_are_tensors_in_any_container(name: str) -> None:
    make, take = CONTAINERS[name]

    def loop(run: Run) -> Any:
        results: list[Any] = []
        run.state.losses = []

        def step(x: Tensor, y: Tensor) -> None:
            results.append(make(update(run, F.cross_entropy(run.model(x), y))))

        def between(i: int) -> None:
            loss = take(results[-1])
            run.state.losses.append(copied(loss))
            assert loss.item() == float(loss.detach().numpy())

        run.between = between
        return step

    trains(loop, "aot_eager", ways=2 if name == "parameter" else 1)


def test_a_result_has_its_identity() -> None:
    def loop(run: Run) -> Any:
        run.state.same = []

        def step(x: Tensor, y: Tensor) -> Any:
            out = run.model(x)
            loss = update(run, F.cross_entropy(out, y))
            weight = next(run.model.parameters())
            kept = {"loss": loss, "again": [loss], "view": out.detach()[0], "out": out.detach()}
            run.last = kept, weight, weight.detach()  # type: ignore[attr-defined]
            return Output(loss)

        def between(i: int) -> None:
            kept, weight, alias = run.last  # type: ignore[attr-defined]
            kept["view"].add_(1)
            run.state.same.append((
                kept["loss"] is kept["again"][0], weight is next(run.model.parameters()),
                alias.data_ptr() == weight.data_ptr(), kept["view"].sum(), kept["out"].sum(),
            ))  # fmt: skip

        run.between = between
        return step

    trains(loop, "openxla")


# Arguments that share memory, at some calls.


def _apart(base: Tensor) -> tuple[Tensor, Tensor]:
    return base[:20].view(5, 4).clone(), base[8:28].view(5, 4).clone()


def _same(base: Tensor) -> tuple[Tensor, Tensor]:
    x = base[:20].view(5, 4)
    return x, x


def _two_objects(base: Tensor) -> tuple[Tensor, Tensor]:
    return base[:20].view(5, 4), base[:20].view(5, 4)


def _overlapping(base: Tensor) -> tuple[Tensor, Tensor]:
    return base[:20].view(5, 4), base[8:28].view(5, 4)


def _strided(base: Tensor) -> tuple[Tensor, Tensor]:
    return base[:40].view(10, 4)[::2], base[:40].view(10, 4)[1::2]


ALIASES = (_same, _two_objects, _overlapping, _strided)


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("other", ALIASES, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("order", [0, 1])
def test_arguments_may_share_memory_at_some_calls(other: Any, writes: bool, order: int) -> None:
    bases: list[Tensor] = []

    def batch(i: int, generator: torch.Generator) -> tuple[Any, ...]:
        base = torch.randn(40, dtype=torch.float64, generator=generator)
        bases.append(base)
        return (_apart, other)[(i // 2 + order) % 2](base)

    def loop(run: Run) -> Any:
        run.state.bases = bases
        bases.clear()

        def step(a: Tensor, b: Tensor) -> Tensor:
            if writes:
                a.mul_(2)
                b[0] = 1
            return update(run, run.model(a).sum() + (run.model(b) ** 2).mean())

        run.between = lambda i: None
        return step

    # A call that writes to arguments that overlap runs in eager, and so does the first one.
    backend = "openxla" if order else "aot_eager"
    step = assert_equal(Case(loop, batch=batch, steps=STEPS, most_eager=5), backend)
    assert step.launches >= STEPS - 5, step.divergences


# Errors of eager.


def _double(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x.float(), y


def _label(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, y + 3


def _negative_label(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, y - 7


def _features(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x[:, :3], y


def _rows(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, y[:3]


def _label_dtype(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, y.float()


def _plain(run: Run) -> Any:
    return lambda x, y: update(run, F.cross_entropy(run.model(x), y))


WRONG = (_double, _label, _negative_label, _features, _rows, _label_dtype)


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("wrong", WRONG, ids=lambda f: f.__name__.strip("_"))
def test_what_eager_refuses_is_refused_by_its_words(wrong: Any, before: int) -> None:
    texts, states = [], []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = network()
        optimizer = momentum(model.parameters())
        run = Run(model, optimizer)
        step: Any = _plain(run)
        if compiled:
            step = compile_step(step, model=model, optimizer=optimizer, backend="openxla")
        generator = torch.Generator().manual_seed(1)
        for i in range(before):
            step(*batches(i, generator))
        state = copied([model.state_dict(), optimizer.state_dict()])
        with pytest.raises(Exception) as raised:  # noqa: PT011
            step(*wrong(*batches(0, generator)))
        texts.append((raised.type, str(raised.value).splitlines()[0]))
        assert all(map(torch.equal, state[0].values(), model.state_dict().values()))
        assert all(p.grad is None for p in model.parameters())
        for i in range(3):
            step(*batches(i, generator))
        states.append(copied([model.state_dict(), optimizer.state_dict()]))
    assert texts[0] == texts[1]
    torch.testing.assert_close(states[0], states[1], rtol=1e-9, atol=1e-9)


# What raised where eager does not.


def _batch_norm_first() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def _instance_norm_first() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, affine=True, track_running_stats=True),
        nn.Flatten(), nn.Linear(4, 3),
    ).double()  # fmt: skip


def _group_norm_first() -> nn.Module:
    return nn.Sequential(nn.GroupNorm(2, 4), nn.Linear(4, 3)).double()


def _layer_norm_first() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3)).double()


def _frozen(*layers: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 3)
        ).double()
        for i in layers:
            model[i].requires_grad_(False)
        return model

    return make


NORMALIZED: dict[str, Callable[[], nn.Module]] = {
    "batch norm": _batch_norm_first, "instance norm": _instance_norm_first,
    "group norm": _group_norm_first, "layer norm": _layer_norm_first,
    "frozen layer before": _frozen(0), "frozen norm": _frozen(0, 1),
    "frozen norm behind": _frozen(3), "frozen norms": _frozen(0, 1, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMALIZED)
def test_normalization_without_gradients_of_its_input(name: str) -> None:
    def loop(run: Run) -> Any:
        return lambda x, y: update(run, F.cross_entropy(run.model(x), y))

    trains(loop, "openxla", model=NORMALIZED[name])


def _one_hot(run: Run, out: Tensor, y: Tensor) -> Tensor:
    return -(F.one_hot(y, 3) * out.log_softmax(-1)).sum(-1).mean()


def _categorical(run: Run, out: Tensor, y: Tensor) -> Tensor:
    policy = torch.distributions.Categorical(logits=out, validate_args=True)
    return -policy.log_prob(policy.sample()).mean() - 0.01 * policy.entropy().mean()


def _normal(run: Run, out: Tensor, y: Tensor) -> Tensor:
    normal = torch.distributions.Normal(out, F.softplus(out) + 0.1, validate_args=True)
    return -normal.log_prob(normal.rsample().tanh()).mean()


def _bernoulli(run: Run, out: Tensor, y: Tensor) -> Tensor:
    return -torch.distributions.Bernoulli(logits=out, validate_args=True).log_prob(
        F.one_hot(y, 3).to(out)
    ).mean()  # fmt: skip


def _divergence(run: Run, out: Tensor, y: Tensor) -> Tensor:
    policy = torch.distributions.Categorical(out.softmax(-1), validate_args=True)
    return torch.distributions.kl_divergence(
        policy, torch.distributions.Categorical(torch.full_like(out, 1 / 3))
    ).mean()


def _independent(run: Run, out: Tensor, y: Tensor) -> Tensor:
    base = torch.distributions.Laplace(out, torch.ones_like(out), validate_args=True)
    return -torch.distributions.Independent(base, 1).log_prob(out.detach() + 1).mean()


CHECKED = (_one_hot, _categorical, _normal, _bernoulli, _divergence, _independent)


@pytest.mark.parametrize("loss", CHECKED, ids=lambda f: f.__name__.strip("_"))
def test_validation_of_values_in_a_step(loss: Any) -> None:
    def loop(run: Run) -> Any:
        return lambda x, y: update(run, loss(run, run.model(x), y))

    trains(loop, "aot_eager" if loss is _categorical else "openxla")  # XLA has no multinomial


def _containers(run: Run) -> Any:
    run.state.lists = collections.defaultdict(list)
    run.state.h, run.state.heap, run.state.counts = [], [], collections.Counter()
    run.state.sums, run.state.recent = numpy.zeros(2), []
    recent = collections.deque([0.0], maxlen=3)
    frozen = ("0.", "9.")

    def step(x: Tensor, y: Tensor) -> Tensor:
        lr = run.optimizer.param_groups[0]["lr"]
        loss = F.cross_entropy(run.model(x), y)
        run.state.lists["loss"].append(loss.detach())
        run.state.h += [x]
        heapq.heappush(run.state.heap, (len(run.state.heap) % 3, len(run.state.heap)))
        run.state.sums += 1
        run.state.counts[f"{lr:.3f}"] += 1
        run.state.counts.update([round(lr, 3)])
        recent.append(round(lr, 3))
        run.state.recent = [*run.state.recent, sum(recent)]
        loss.backward()
        for n, p in run.model.named_parameters():
            if any(n.startswith(f) for f in frozen):
                p.grad = None
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.optimizer.param_groups[0]["lr"] = lr * 0.9
        return loss

    return step


def test_python_that_has_raised() -> None:
    trains(_containers)


class UserError(Exception):
    """Of a user's code."""


def test_an_exception_of_the_user_arrives_as_itself() -> None:
    def loop(run: Run) -> Any:
        n, run.state.errors = 0, []

        def step(x: Tensor, y: Tensor) -> Tensor:
            nonlocal n
            n += 1
            loss = F.cross_entropy(run.model(x), y)
            if n in (3, 5):
                raise UserError(n, {"step": n})
            return update(run, loss)

        def caught(*batch: Any) -> Any:
            try:
                return run.step(*batch)  # type: ignore[attr-defined]
            except UserError as error:
                run.state.errors.append((type(error), error.args, error.__cause__))
                return None

        run.caught = caught  # type: ignore[attr-defined]
        return step

    left = []
    for compiled in (False, True):
        torch.manual_seed(0)
        run = Run(network(), None)
        run.optimizer = momentum(run.model.parameters())
        step: Any = loop(run)
        if compiled:
            step = compile_step(step, model=run.model, optimizer=run.optimizer, backend="openxla")
        run.step = step  # type: ignore[attr-defined]
        generator = torch.Generator().manual_seed(1)
        results = [copied(run.caught(*batches(i, generator))) for i in range(STEPS)]  # type: ignore[attr-defined]
        left.append([results, copied(dict(run.model.state_dict())), run.state.errors])
    assert left[1][2] == left[0][2] == [(UserError, (n, {"step": n}), None) for n in (3, 5)]
    torch.testing.assert_close(left[1][:2], left[0][:2], rtol=1e-9, atol=1e-9, equal_nan=True)
    assert (step.eager_steps, step.launches) == (1, STEPS - 3), step.divergences


@pytest.mark.parametrize("backend", ["openxla", "onnxrt", "ov"])
def test_a_checkpoint_around_a_batch_norm_in_a_compiled_model(backend: str) -> None:
    """By torch.compile, without a step: the running averages are those of torch's compilation."""
    pytest.importorskip({"onnxrt": "onnxruntime", "ov": "openvino"}.get(backend, "torch"))
    left = []
    for compiler in ("aot_eager", backend):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 6), nn.Sequential(nn.BatchNorm1d(6), nn.Tanh()), nn.Linear(6, 3)
        )

        def forward(x: Tensor, model: Any = model) -> Tensor:
            hidden = checkpoint(model[1], model[0](x), use_reentrant=False)
            return model[2](hidden)

        function = torch.compile(forward, backend=compiler)
        generator = torch.Generator().manual_seed(1)
        for i in range(2):
            x, y = batches(i, generator)
            F.cross_entropy(function(x.float()), y).backward()
        gradients = [copied(p.grad) for p in model.parameters()]
        left.append([copied(dict(model.state_dict())), gradients])
    torch.testing.assert_close(left[1], left[0], rtol=1e-4, atol=1e-5)


def test_random_numbers_of_every_source() -> None:
    def loop(run: Run) -> Any:
        own = torch.Generator().manual_seed(3)
        numbers = numpy.random.default_rng(5)
        run.state.drawn = []

        def step(x: Tensor, y: Tensor) -> Tensor:
            x = x + 0.1 * torch.randn(x.shape, dtype=x.dtype, generator=own)
            loss = F.cross_entropy(F.dropout(run.model(x), 0.3), y) * (1 + random.random())
            loss = loss + float(numbers.normal()) * 0.01 + numpy.random.rand() * 0.01
            run.state.drawn.append((random.randint(0, 9), int(numpy.random.randint(9))))
            run.state.own = own.get_state()
            return update(run, loss)

        return step

    trains(loop, "openxla")

"""Steps that did not equal eager when a step was captured once, by kind, each with its relatives.

Each loop runs in eager and compiled, and all that it leaves is compared: results, gradients, the
model, the optimizer, Python's state and random state. Most of its calls run programs.
"""

import collections
import contextvars
import dataclasses
import enum
import functools
import heapq
import importlib
import io
import itertools
import multiprocessing
import os
import queue
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dynamo_backends import compile_step
from tests.aot.replay.checks import Case, Run, assert_equal, batches, copied, momentum, network

STEPS = 8

Loop = Callable[[Run], Callable[..., Any]]


def update(run: Run, loss: Tensor) -> Tensor:
    """The rest of a step."""
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    return loss


def trains(loop: Loop, backend: str = "openxla", ways: int = 1, **settings: Any) -> Any:
    """Compares a loop with eager; the calls that go no new way run programs.

    Args:
        loop: From a run to its step function.
        backend: What compiles it.
        ways: How many the loop goes.
        settings: Of the case.

    Returns:
        Its step.
    """
    steps = settings.pop("steps", STEPS)
    step = assert_equal(Case(loop, steps=steps, most_eager=ways, **settings), backend)
    assert step.launches >= steps - ways > 0, (step.launches, step.eager_steps)
    return step


# Free variables of nested functions: they have the values of this call, and writes to them stay.


def _configuration(run: Run) -> SimpleNamespace:
    cfg = SimpleNamespace(weights={"main": 1.0, "extra": 0.5}, scale=1.0)

    def change(i: int) -> None:
        cfg.weights.update(main=1.0 / (i + 2), extra=0.1 * i + 0.05)
        cfg.scale = 1.5 + i / 8

    run.between = change
    return cfg


def _losses(run: Run, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    out = run.model(x)
    return {"main": F.cross_entropy(out, y), "extra": out.square().mean()}


def in_generator_expression(cfg: Any, losses: dict[str, Tensor]) -> Any:
    return sum(cfg.weights[k] * v for k, v in losses.items())


def in_list_comprehension(cfg: Any, losses: dict[str, Tensor]) -> Any:
    return torch.stack([cfg.weights[k] * v for k, v in losses.items()]).sum()


def in_dict_comprehension(cfg: Any, losses: dict[str, Tensor]) -> Any:
    return sum({k: cfg.weights[k] * v for k, v in losses.items()}.values())


def in_map(cfg: Any, losses: dict[str, Tensor]) -> Any:
    return sum(map(lambda k: cfg.weights[k] * losses[k], losses))  # noqa: C417


def in_reduction(cfg: Any, losses: dict[str, Tensor]) -> Any:
    return functools.reduce(lambda a, k: a + cfg.weights[k] * losses[k], losses, 0.0)


def in_starmap(cfg: Any, losses: dict[str, Tensor]) -> Any:
    return sum(itertools.starmap(lambda k, v: cfg.weights[k] * v, losses.items()))


def in_checkpoint(cfg: Any, losses: dict[str, Tensor]) -> Any:
    return checkpoint(lambda v: v * v * cfg.scale, losses["main"], use_reentrant=False)


def in_checkpoint_that_saves_nothing(cfg: Any, losses: dict[str, Tensor]) -> Any:
    return checkpoint(lambda v: v * cfg.scale, losses["main"], use_reentrant=False)


def in_reentrant_checkpoint(cfg: Any, losses: dict[str, Tensor]) -> Any:
    return checkpoint(
        lambda v: v.exp() * cfg.scale / cfg.weights["main"], losses["main"], use_reentrant=True
    )


def in_checkpointed_layer(cfg: Any, losses: dict[str, Tensor]) -> Any:
    def layer(v: Tensor) -> Tensor:
        return (v.exp() * cfg.scale).tanh() ** cfg.scale - cfg.weights["main"] / v.clamp(
            min=cfg.scale / 9
        )

    return checkpoint(layer, torch.stack([*losses.values()]), use_reentrant=False).sum()


def in_nested_function(cfg: Any, losses: dict[str, Tensor]) -> Any:
    def weighed(k: str) -> Tensor:
        def times(v: Tensor) -> Tensor:
            return cfg.weights[k] * v

        return times(losses[k])

    return weighed("main") + weighed("extra")


READS = (in_generator_expression, in_list_comprehension, in_dict_comprehension, in_map,
         in_reduction, in_starmap, in_checkpoint, in_checkpoint_that_saves_nothing,
         in_reentrant_checkpoint, in_checkpointed_layer, in_nested_function)  # fmt: skip


@pytest.mark.parametrize("read", READS, ids=lambda f: f.__name__)
def test_nested_functions_read_what_is_there_now(read: Any) -> None:
    def loop(run: Run) -> Any:
        cfg = _configuration(run)
        return lambda x, y: update(run, read(cfg, _losses(run, x, y)))

    trains(loop)


CHOICES = {
    "max": lambda cfg, losses: losses[max(losses, key=lambda k: cfg.weights[k])],
    "min": lambda cfg, losses: losses[min(losses, key=lambda k: cfg.weights[k])],
    "sorted": lambda cfg, losses: losses[sorted(losses, key=lambda k: -cfg.weights[k])[0]],
    "any": lambda cfg, losses: losses[
        "main" if any(w > 0.4 for w in cfg.weights.values()) else "extra"
    ],
    "next": lambda cfg, losses: next(v for k, v in losses.items() if cfg.weights[k] > 0.1),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_nested_functions_choose_by_what_is_there_now(name: str) -> None:
    def loop(run: Run) -> Any:
        cfg = _configuration(run)
        return lambda x, y: update(run, CHOICES[name](cfg, _losses(run, x, y)))

    trains(loop, ways=2)


def _counts_by_closure(run: Run) -> Any:
    calls, run.state.seen = 0, []

    def step(x: Tensor, y: Tensor) -> Tensor:
        def closure() -> Tensor:
            nonlocal calls
            calls += 1
            run.optimizer.zero_grad()
            loss = F.cross_entropy(run.model(x), y) / (1 + calls % 3)
            loss.backward()
            return loss

        loss = run.optimizer.step(closure)
        run.state.seen.append(calls)
        return loss

    return step


def _counts_in_nested_functions(run: Run) -> Any:
    run.state.seen, calls = [], 0

    def count(v: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return v * calls

    def step(x: Tensor, y: Tensor) -> Tensor:
        losses = _losses(run, x, y)
        loss = sum(map(count, losses.values())) / 10
        loss = loss + torch.stack([count(v) for v in losses.values()]).mean() / 10
        run.state.seen.append(calls)
        return update(run, loss)

    return step


def _counts_in_checkpoints(run: Run) -> Any:
    run.state.seen, calls = [], 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        def part(v: Tensor) -> Tensor:
            nonlocal calls
            calls += 1  # in the backward pass, too
            return run.model(v)

        loss = F.cross_entropy(checkpoint(part, x, use_reentrant=False), y)
        update(run, loss)
        run.state.seen.append(calls)
        return loss

    return step


def _counts_in_class_of_step(run: Run) -> Any:
    run.state.seen = []

    class Trainer:
        calls = 0

        def step(self, x: Tensor, y: Tensor) -> Tensor:
            type(self).calls += 1
            self.last = getattr(self, "last", 0) + self.calls
            run.state.seen.append((self.calls, self.last))
            return update(run, F.cross_entropy(run.model(x), y) / self.calls)

    return Trainer().step


@pytest.mark.parametrize(
    "loop",
    [_counts_by_closure, _counts_in_nested_functions, _counts_in_checkpoints,
     _counts_in_class_of_step],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_nested_functions_write_at_each_call(loop: Loop) -> None:
    trains(loop, ways=1)


# Counters as keys, members and text.


class Phase(enum.Enum):
    """Of a training."""

    WARM = 0.5
    FULL = 1.0


CONFIGURED = {2, 4}
TABLE = {1: 0.2, 3: 0.05}


def _member(run: Run, n: int) -> None:
    if n in CONFIGURED:
        run.state.log.append(n)
        run.optimizer.param_groups[0]["lr"] *= 0.5


def _key(run: Run, n: int) -> None:
    run.optimizer.param_groups[0]["lr"] = TABLE.get(n, 0.1)


def _table(run: Run, n: int) -> None:
    run.optimizer.param_groups[0]["lr"] = [0.1, 0.2, 0.05][n % 3]


def _case(run: Run, n: int) -> None:
    match n:
        case 3 | 5:
            run.state.log.append("match")
        case _ if n > 6:
            run.state.log.append("late")


def _range(run: Run, n: int) -> None:
    if n in range(2, 20, 3) or not n % 4:
        run.state.log.append(n)


def _phase(run: Run, n: int) -> None:
    run.state.log.append((Phase.WARM if n < 3 else Phase.FULL).name)


def _text(run: Run, n: int) -> None:
    lr = run.optimizer.param_groups[0]["lr"] = 0.1 / n
    run.state.log.append(f"step {n}: {lr:.3f} {lr} {lr!r} {round(lr, 3)} {n:04d} {n!s} {n!r}")
    run.state.log.append("%d %s %.2e" % (n, n, lr))  # noqa: UP031
    run.state.log.append("{} {:>5}".format(n, n) + "|".join(map(str, range(n))))  # noqa: UP032
    run.state.log += [
        hex(n),
        bin(n),
        n.bit_length(),
        hash(n),
        int(str(n)),
        divmod(n, 3),
        n.__index__(),
    ]


def _file(run: Run, n: int) -> None:
    file = io.StringIO()
    print(f"step {n}", n, file=file, end="!")
    run.state.log.append(file.getvalue())


NUMBERS = (_member, _key, _table, _case, _range, _phase, _text, _file)


@pytest.mark.parametrize("use", NUMBERS, ids=lambda f: f.__name__.strip("_"))
def test_counters_are_keys_members_and_text(use: Callable[[Run, int], None]) -> None:
    def loop(run: Run) -> Any:
        n, run.state.log, run.state.history = 0, [], {}

        def step(x: Tensor, y: Tensor) -> Tensor:
            nonlocal n
            n += 1
            use(run, n)
            loss = update(run, F.cross_entropy(run.model(x), y))
            run.state.history[f"loss/{n}"] = run.state.history["last", n] = loss.detach()
            return loss

        return step

    trains(loop, ways=1)


def test_what_is_printed_is_that_of_eager(capsys: pytest.CaptureFixture[str]) -> None:
    def loop(run: Run) -> Any:
        n = 0

        def step(x: Tensor, y: Tensor) -> Tensor:
            nonlocal n
            n += 1
            loss = update(run, F.cross_entropy(run.model(x), y))
            print(f"step {n}", n, run.optimizer.param_groups[0]["lr"] / n)
            print(f"{loss.item():.6f}", loss.shape, loss.dtype, file=sys.stderr)
            return loss

        return step

    trains(loop)
    out, err = capsys.readouterr()
    for text in (out.splitlines(), err.splitlines()):
        assert len(text) == 2 * STEPS
        assert text[:STEPS] == text[STEPS:]
    assert len(set(out.splitlines())) == STEPS


# Objects: what the step reads of them may change between its calls, or by itself.


class DotDict(dict):  # type: ignore[type-arg]
    """A dict whose items are attributes."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Slots:
    """An object without a dict."""

    __slots__ = ("value",)


class Computed:
    """An object whose attribute is a property over a descriptor."""

    def __init__(self) -> None:
        self._values = [1.0]

    @property
    def value(self) -> float:
        return self._values[-1]

    @value.setter
    def value(self, new: float) -> None:
        self._values.append(new)


Get = Callable[[], float]
Set = Callable[[float], Any]
Place = Callable[[Path], tuple[Get, Set]]


def _attribute(owner: Any) -> tuple[Get, Set]:
    owner.value = 1.0
    return lambda: owner.value, lambda new: setattr(owner, "value", new)


def of_partial(_: Path) -> tuple[Get, Set]:
    cfg = {"scale": 1.0}
    read = functools.partial(lambda cfg: cfg["scale"], cfg=cfg)
    return read, lambda new: cfg.update(scale=new)


def of_partial_method(_: Path) -> tuple[Get, Set]:
    class Owner:
        scale = 1.0

        def get(self, name: str) -> float:
            return getattr(self, name)

        get_scale = functools.partialmethod(get, "scale")

    owner = Owner()
    return owner.get_scale, lambda new: setattr(owner, "scale", new)


def of_dot_dict(_: Path) -> tuple[Get, Set]:
    cfg = DotDict(optim=DotDict(scale=1.0))
    return lambda: cfg.optim.scale, lambda new: cfg.optim.update(scale=new)


def of_slots(_: Path) -> tuple[Get, Set]:
    return _attribute(Slots())


def of_property(_: Path) -> tuple[Get, Set]:
    return _attribute(Computed())


def of_tensor_attribute(_: Path) -> tuple[Get, Set]:
    return _attribute(torch.zeros(2))


def of_function_attribute(_: Path) -> tuple[Get, Set]:
    def owner() -> None: ...

    return _attribute(owner)


def of_import(folder: Path) -> tuple[Get, Set]:
    (folder / "conf_of_a_step.py").write_text("value = 1.0\n")
    sys.modules.pop("conf_of_a_step", None)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()

    def read() -> float:
        import conf_of_a_step as conf  # type: ignore[import-not-found]

        return conf.value

    def write(new: float) -> None:
        sys.modules["conf_of_a_step"].value = new  # type: ignore[attr-defined]

    return read, write


def of_reload(folder: Path) -> tuple[Get, Set]:
    read, _ = of_import(folder)

    def write(new: float) -> None:
        (folder / "conf_of_a_step.py").write_text(f"value = {new}  # {'-' * int(new * 100)}\n")
        importlib.reload(sys.modules["conf_of_a_step"])

    return read, write


def of_weak_reference(_: Path) -> tuple[Get, Set]:
    owner = types.FunctionType((lambda: None).__code__, {})
    get, put = _attribute(owner)
    reference = weakref.ref(owner)
    return lambda: reference().value + 0 * len(str(get)), put  # type: ignore[union-attr]


def of_weak_dictionary(_: Path) -> tuple[Get, Set]:
    key = torch.zeros(1)
    values: Any = weakref.WeakKeyDictionary({key: 1.0})
    return lambda: values[key], lambda new: values.__setitem__(key, new)


def of_cache(_: Path) -> tuple[Get, Set]:
    source = [1.0]

    @functools.lru_cache
    def read() -> float:
        return source[0]

    def write(new: float) -> None:
        source[0] = new
        read.cache_clear()

    return read, write


def of_cached_property(_: Path) -> tuple[Get, Set]:
    class Owner:
        source = 1.0

        @functools.cached_property
        def value(self) -> float:
            return self.source

    owner = Owner()

    def write(new: float) -> None:
        owner.source = new
        vars(owner).pop("value", None)

    return lambda: owner.value, write


def of_context_variable(_: Path) -> tuple[Get, Set]:
    value: contextvars.ContextVar[float] = contextvars.ContextVar("value", default=1.0)
    return value.get, lambda new: value.set(new) and None


def of_thread_local(_: Path) -> tuple[Get, Set]:
    return _attribute(threading.local())


def of_environment(_: Path) -> tuple[Get, Set]:
    os.environ["SCALE_OF_A_STEP"] = "1.0"
    return (
        lambda: float(os.environ["SCALE_OF_A_STEP"]),
        lambda new: os.environ.update(SCALE_OF_A_STEP=str(new)),
    )


def of_shared_value(_: Path) -> tuple[Get, Set]:
    value = multiprocessing.Value("d", 1.0)
    return lambda: value.value, lambda new: setattr(value, "value", new)


def of_shared_array(_: Path) -> tuple[Get, Set]:
    values = multiprocessing.Array("d", [1.0, 1.0])
    return lambda: values[1], lambda new: values.__setitem__(1, new)


def of_queue(_: Path) -> tuple[Get, Set]:
    line: queue.Queue[float] = queue.Queue()
    line.put(1.0)

    def read() -> float:
        value = line.get()
        line.put(value)
        return value

    return read, lambda new: line.get() and line.put(new)


def of_file(folder: Path) -> tuple[Get, Set]:
    path = folder / "scale"
    path.write_text("1.0")
    return lambda: float(path.read_text()), lambda new: path.write_text(str(new)) and None


def of_numpy(_: Path) -> tuple[Get, Set]:
    array = numpy.ones(3)
    return lambda: float(array[1]), lambda new: array.__setitem__(1, new)


def of_heap(_: Path) -> tuple[Get, Set]:
    heap = [1.0]
    return lambda: heap[0], lambda new: heapq.heapreplace(heap, new) and None


def of_deque(_: Path) -> tuple[Get, Set]:
    recent = collections.deque([1.0], maxlen=2)
    return lambda: recent[-1], recent.append


def of_chain_map(_: Path) -> tuple[Get, Set]:
    values = collections.ChainMap({}, {"scale": 1.0})
    return lambda: values["scale"], lambda new: values.update(scale=new)


def of_named_tuple(_: Path) -> tuple[Get, Set]:
    class Config(NamedTuple):
        scale: float = 1.0

    cfg = [Config()]
    return lambda: cfg[0].scale, lambda new: cfg.__setitem__(0, cfg[0]._replace(scale=new))


def of_frozen_dataclass(_: Path) -> tuple[Get, Set]:
    @dataclasses.dataclass(frozen=True)
    class Config:
        scale: float = 1.0

    cfg = [Config()]

    def write(new: float) -> None:
        cfg[0] = dataclasses.replace(cfg[0], scale=new)

    return lambda: cfg[0].scale, write


def of_generator(_: Path) -> tuple[Get, Set]:
    values = [1.0]

    def draw() -> Iterator[float]:
        while True:
            yield values[0]

    drawn = draw()
    return lambda: next(drawn), lambda new: values.__setitem__(0, new)


PLACES = (
    of_partial, of_partial_method, of_dot_dict, of_slots, of_property, of_tensor_attribute,
    of_function_attribute, of_import, of_reload, of_weak_reference, of_weak_dictionary, of_cache,
    of_cached_property, of_context_variable, of_thread_local, of_environment, of_shared_value,
    of_shared_array, of_queue, of_file, of_numpy, of_heap, of_deque, of_chain_map, of_named_tuple,
    of_frozen_dataclass, of_generator,
)  # fmt: skip


@pytest.mark.parametrize("writer", ["between", "step"])
@pytest.mark.parametrize("place", PLACES, ids=lambda f: f.__name__)
def test_objects_are_read_and_written_at_each_call(
    place: Place, writer: str, tmp_path: Path
) -> None:
    def loop(run: Run) -> Any:
        read, write = place(tmp_path)
        run.state.seen = []

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = read() * F.cross_entropy(run.model(x), y)
            if writer == "step":
                write(read() + 0.25)
            run.state.seen.append(read())
            return update(run, loss)

        if writer == "between":
            run.between = lambda i: write(1.5 + i / 8)
        return step

    try:
        trains(loop, "aot_eager")
    finally:
        sys.path[:] = [p for p in sys.path if p != str(tmp_path)]
        os.environ.pop("SCALE_OF_A_STEP", None)


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
def test_checks_of_values_are_made_in_a_step(loss: Any) -> None:
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

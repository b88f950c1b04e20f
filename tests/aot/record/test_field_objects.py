"""Steps that read and write objects of all kinds.

These loops did not equal eager when a step was captured once. Each runs in eager and compiled, and
all that it leaves is compared: results, gradients, the model, the optimizer, Python's state and
random state. Most of its calls run programs.
"""

import collections
import contextvars
import dataclasses
import functools
import heapq
import importlib
import multiprocessing
import os
import queue
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.aot.record.checks import (
    Run,
    trains,
    update,
)

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

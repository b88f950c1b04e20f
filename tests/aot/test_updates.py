"""Inputs that an inference graph updates: in place where the backend can, all of them or none."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import dynamo_backends
from dynamo_backends import _torch_private as private
from dynamo_backends.xla.owned_memory import find_owned
from tests import rotation
from tests.aot.interruptions import Instructions, watched

FILES = (
    "aot/updates.py", "aot/autograd.py", "aot/serialized.py", "runtime/atomic_copies.py",
    "runtime/program.py", "runtime/staging.py", "graph/layouts.py", "pipeline/compiled_graph.py",
    "xla/updating.py", "xla/owned_memory.py", "xla/arrays.py", "xla/_jaxlib.py", "ort/runtime.py",
)  # fmt: skip
BACKENDS = ("openxla", "onnxrt", "ts_trace")

pytestmark = pytest.mark.usefixtures("_no_gradients")


@pytest.fixture
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Cache:
    """What a decoder keeps: keys, values, and how many of them there are."""

    def __init__(self, size: int = 50):
        torch.manual_seed(0)
        self.tensors = [torch.randn(1, 2, size, 64), torch.randn(1, 2, size, 64), torch.tensor(3)]

    def copy(self) -> list[Tensor]:
        return [t.clone() for t in self.tensors]

    def put(self, contents: list[Tensor]) -> None:
        for tensor, content in zip(self.tensors, contents, strict=True):
            tensor.copy_(content)


def decode(keys: Tensor, values: Tensor, length: Tensor, x: Tensor) -> Tensor:
    position = torch.arange(x.shape[-2]) + length
    length.add_(x.shape[-2])
    keys.index_copy_(2, position, x.sin())
    values.index_copy_(2, position, x.cos())
    return nn.functional.scaled_dot_product_attention(x, keys, values)


def row() -> Tensor:
    return torch.randn(1, 2, 1, 64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [1, 4])
def test_a_cache_is_written_to_as_in_eager(backend: str, rows: int):
    cache, expected = Cache(), Cache()
    versions = [t._version for t in cache.tensors]
    compiled = torch.compile(decode, backend=backend, fullgraph=True)
    for _ in range(4):
        x = torch.randn(1, 2, rows, 64)
        torch.testing.assert_close(compiled(*cache.tensors, x), decode(*expected.tensors, x))
        torch.testing.assert_close(cache.tensors, expected.tensors)
    assert all(t._version > v for t, v in zip(cache.tensors, versions, strict=True))


class Sizes(TorchDispatchMode):
    """The largest result that torch makes or writes, in elements."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.index_put_.default:  # which writes what it is given
            self.largest = max(self.largest, args[2].numel())
        elif isinstance(result, Tensor) and not func.is_view:
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_no_cache_is_copied(backend: str):
    cache, sizes = Cache(4000), Sizes()

    def watched_backend(gm: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        function = private.lookup_backend(backend)(gm, inputs)

        def call(*args: Any) -> Any:
            with sizes if is_watched else contextlib.nullcontext():
                return function(*args)

        return call

    is_watched = False
    compiled = torch.compile(decode, backend=watched_backend, fullgraph=True)
    for _ in range(2):
        compiled(*cache.tensors, row())
    addresses = [t.data_ptr() for t in cache.tensors]
    is_watched = True
    compiled(*cache.tensors, row())
    assert sizes.largest
    assert sizes.largest < cache.tensors[0].numel() / 10
    assert addresses == [t.data_ptr() for t in cache.tensors]


def test_xla_needs_no_memory_for_another_cache():
    cache = Cache(4000)
    with dynamo_backends.record() as reports:
        torch.compile(decode, backend="openxla", fullgraph=True)(*cache.tensors, row())
    (block,) = reports[0].executable.static_program.blocks
    statistics = block.executable.main.get_compiled_memory_stats()
    size = sum(t.numel() * t.element_size() for t in cache.tensors)
    assert statistics.alias_size_in_bytes >= size
    assert statistics.temp_size_in_bytes < size / 10


@pytest.fixture
def _signals_interrupt() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_signals_interrupt")
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_a_signal_leaves_all_or_nothing(backend: str, shared: bool, request: pytest.FixtureRequest):
    """At every 13th instruction, others in each run, and at every one with `--full`."""
    cache, x = Cache(), row()
    view = cache.tensors[0].detach() if shared else None
    compiled = torch.compile(decode, backend=backend, fullgraph=True)
    for _ in range(3):
        before = cache.copy()
        compiled(*cache.tensors, x)
    after = cache.copy()
    cache.put(before)
    counting = Instructions(FILES)
    with watched(counting):
        compiled(*cache.tensors, x)
    found = set()
    for number in rotation.part(counting.count, 1 if request.config.getoption("--full") else 13):
        cache.put(before)
        with pytest.raises(KeyboardInterrupt), watched(Instructions(FILES, number)):
            compiled(*cache.tensors, x)
        now = cache.copy()
        moments = [all(map(torch.equal, now, then)) for then in (before, after)]
        assert any(moments), f"instruction {number} of {counting.count}"
        found.add(moments[0])
    assert True in found
    assert view is None or torch.equal(view, cache.tensors[0])


def test_memory_that_others_see_stays_where_it_is():
    cache, expected = Cache(), Cache()
    view = cache.tensors[0][:, :, 3:5]
    compiled = torch.compile(decode, backend="openxla", fullgraph=True)
    for _ in range(3):
        x = row()
        torch.testing.assert_close(compiled(*cache.tensors, x), decode(*expected.tensors, x))
        torch.testing.assert_close(cache.tensors, expected.tensors)
        assert torch.equal(view, cache.tensors[0][:, :, 3:5])
    assert [find_owned(t) is not None for t in cache.tensors] == [False, True, True]


def test_views_taken_later_see_what_is_written():
    cache = Cache()
    compiled = torch.compile(decode, backend="openxla", fullgraph=True)
    for _ in range(2):  # the first is compared with eager, on a copy
        compiled(*cache.tensors, row())
    view = cache.tensors[0][:, :, 5:7]
    compiled(*cache.tensors, row())
    compiled(*cache.tensors, row())
    assert torch.equal(view, cache.tensors[0][:, :, 5:7])
    assert find_owned(cache.tensors[0])


@pytest.mark.parametrize("is_seen", [False, True], ids=["alone", "seen"])
def test_what_a_program_returned_is_updated_where_it_is(is_seen: bool):
    """If nobody else sees it; else it becomes a guest, as any other tensor."""
    fill = torch.compile(lambda x: x.sin() + 1, backend="openxla", fullgraph=True)
    compiled = torch.compile(decode, backend="openxla", fullgraph=True)
    for _ in range(2):  # the first is compared with eager, on a copy
        cache, expected = Cache(400), Cache(400)
        cache.tensors[:2] = [fill(t) for t in cache.tensors[:2]]
        expected.put([t.clone() for t in cache.tensors])
        view = cache.tensors[0][:, :, 3:5] if is_seen else None
        addresses = [t.data_ptr() for t in cache.tensors[:2]]
        for _ in range(2):
            x = row()
            torch.testing.assert_close(compiled(*cache.tensors, x), decode(*expected.tensors, x))
            torch.testing.assert_close(cache.tensors, expected.tensors)
        assert addresses == [t.data_ptr() for t in cache.tensors[:2]]
        assert view is None or torch.equal(view, cache.tensors[0][:, :, 3:5])
    owners = [find_owned(t) is not None for t in cache.tensors]
    assert owners == [not is_seen, True, True]


def _from_the_other(x: Tensor, y: Tensor) -> Tensor:
    y.copy_(x)
    x.add_(1)
    return y.sin()


def _swapped(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    x.copy_(y)
    y.copy_(z)
    return x - y


def _transposed(x: Tensor, y: Tensor) -> Tensor:
    x.t().mul_(y)
    y.add_(x)
    return x.sin()


def _written_over(x: Tensor, y: Tensor) -> Tensor:
    x.zero_()
    y.mul_(x.cos() + 1)
    return y.sin()


def _result_is_input(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x.add_(y)
    return x, x[0]


def _all_rows(x: Tensor, y: Tensor) -> Tensor:
    index = torch.tensor([2, 0, 1])
    x.index_copy_(0, index, y)
    y.index_copy_(0, index, x)
    return x + y


FUNCTIONS = (
    _from_the_other, _swapped, _transposed, _written_over, _result_is_input, _all_rows,
)  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_inputs_become_what_they_become_in_eager(backend: str, function: Callable[..., Any]):
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for _ in range(3):
        expected = torch.randn(3, 3), torch.randn(3, 3)
        given = tuple(x.clone() for x in expected)
        torch.testing.assert_close(compiled(*given), function(*expected))
        torch.testing.assert_close(given, expected)
        assert [x.stride() for x in given] == [x.stride() for x in expected]


@pytest.mark.parametrize("backend", ["openxla", "onnxrt"])
def test_in_inference_mode(backend: str):
    with torch.inference_mode():
        cache, expected = Cache(), Cache()
        compiled = torch.compile(decode, backend=backend, fullgraph=True)
        for _ in range(3):
            x = row()
            torch.testing.assert_close(compiled(*cache.tensors, x), decode(*expected.tensors, x))
            torch.testing.assert_close(cache.tensors, expected.tensors)


def test_an_index_that_is_out_of_range_writes_nothing():
    """Negative ones count from the end, as in eager."""

    def put(x: Tensor, index: Tensor, y: Tensor) -> Tensor:
        x.index_put_((index,), y)
        return x.sin()

    compiled = torch.compile(put, backend="openxla", fullgraph=True)
    for index, expected in ((-1, [0.0, 0.0, 1.0]), (0, [1.0, 0.0, 0.0])):
        x = torch.zeros(3)
        compiled(x, torch.tensor([index]), torch.ones(1))
        assert x.tolist() == expected
    x = torch.zeros(3)
    with pytest.raises(IndexError, match="index 3 is out of bounds for dimension 0 with size 3"):
        compiled(x, torch.tensor([3]), torch.ones(1))
    assert x.tolist() == [0.0] * 3

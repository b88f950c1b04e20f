"""Convolutions by Winograd's filtering: the operator, and where Inductor's graphs call it."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynamo_backends._torch_private import meets_benchmark_accuracy
from dynamo_backends.inductor import runtime
from dynamo_backends.kernels import winograd
from dynamo_backends.kernels.winograd import CONVOLVE, TRANSFORM
from dynamo_backends.kernels.winograd_transforms import F2, F2_OF_5, F4, Transforms
from tests.backend_checks import threads_agree
from tests.inductor.checking import EXACT, check
from tests.kernels.planted import always

LANES, PANEL = winograd._library().lanes(), winograd._library().panel()
FILTERINGS = {"F2": F2, "F4": F4, "F2_OF_5": F2_OF_5}


@pytest.mark.parametrize("f", FILTERINGS.values(), ids=FILTERINGS)
def test_the_transforms_are_those_of_a_convolution(f: Transforms):
    rng = np.random.default_rng(0)
    tile, taps = rng.standard_normal(f.input.shape), rng.standard_normal((f.taps, f.taps))
    product = (f.weight @ taps @ f.weight.T) * (f.input @ tile @ f.input.T)
    places = np.ndindex(f.taps, f.taps)
    shifted = [tile[i : i + f.m, j : j + f.m] * taps[i, j] for i, j in places]
    np.testing.assert_allclose(f.output @ product @ f.output.T, sum(shifted), 1e-10)
    exact = [np.float32(row).astype(np.float64) for row in (f.input, f.output)]
    assert all(np.array_equal(a, b) for a, b in zip(exact, (f.input, f.output), strict=True))


SHAPES = [  # batch, lanes in, panels out, height, width, padding
    (2, 1, 1, 7, 9, (1, 1)),
    (1, 2, 2, 1, 1, (2, 2)),
    (3, 3, 1, 13, 5, (0, 2)),
    (1, 1, 1, 5, 5, (0, 0)),
    (2, 5, 3, 30, 31, (2, 0)),
    (4, 8, 4, 56, 56, (1, 1)),  # more tiles than are worked on at a time
]
LARGE = pytest.param(SHAPES[-1], marks=pytest.mark.long)


@pytest.mark.parametrize("name", FILTERINGS)
@pytest.mark.parametrize("shape", [*SHAPES[:-1], LARGE], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_the_operator_is_as_accurate_as_a_convolution(name: str, shape: Any, layout: Any):
    batch, lanes, panels, height, width, padding = shape
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(batch, lanes * LANES, height, width, generator=draw).to(memory_format=layout)
    taps = FILTERINGS[name].taps
    w = torch.randn(panels * PANEL, lanes * LANES, taps, taps, generator=draw)
    w = w.to(memory_format=layout)
    bias = torch.randn(len(w), generator=draw)
    u = TRANSFORM(w, name, PANEL, torch.float32)
    residual = torch.randn_like(F.conv2d(x, w, padding=padding))
    for b in (None, bias):
        for r in (None, residual):
            for relu in (False, True):
                expected, precise = (_follow(x, w, b, r, padding, relu, d) for d in _DTYPES)
                found = CONVOLVE(x, u, b, r, name, list(padding), relu)
                assert found.is_contiguous(memory_format=torch.channels_last)
                assert meets_benchmark_accuracy(expected, found, precise, tol=1e-4)


_DTYPES = (torch.float32, torch.float64)


@pytest.fixture(params=[False, True], ids=["own", "shared"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """There are several, and threads share them or have their own."""
    monkeypatch.setattr(winograd, "_OWN_WEIGHT", 0 if request.param else 1 << 40)
    monkeypatch.setattr(winograd, "_CHUNK", 0)
    monkeypatch.setattr(winograd, "_LEAST", 20)
    monkeypatch.setattr(winograd, "_OWN_CHUNK", 0)
    winograd._plan.cache_clear()
    yield
    winograd._plan.cache_clear()


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("name", FILTERINGS)
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_share_chunks_or_have_their_own(name: str, threads: int):
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        draw, taps = torch.Generator().manual_seed(0), FILTERINGS[name].taps
        x = torch.randn(2, 2 * LANES, 25, 26, generator=draw)
        w = torch.randn(2 * PANEL, 2 * LANES, taps, taps, generator=draw)
        expected, precise = (_follow(x, w, None, None, 1, False, d) for d in _DTYPES)
        found = CONVOLVE(
            x, TRANSFORM(w, name, PANEL, torch.float32), None, None, name, [1, 1], False
        )
    finally:
        torch.set_num_threads(usual)
    assert meets_benchmark_accuracy(expected, found, precise, tol=1e-4)


needs_bfloat16 = pytest.mark.skipif(
    not winograd._library().has_bfloat16(), reason="this processor has no products of bfloat16"
)


@needs_bfloat16
@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("name", winograd._IN_BFLOAT16)
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[1] % 2 == 0], ids=str)
def test_bfloat16_errs_at_most_twice_as_much_as_a_convolution(name: str, shape: Any):
    batch, lanes, panels, height, width, padding = shape
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(batch, lanes * LANES, height, width, generator=draw).bfloat16()
    taps = FILTERINGS[name].taps
    w = torch.randn(panels * PANEL, lanes * LANES, taps, taps, generator=draw)
    bias = torch.randn(len(w), generator=draw)
    residual = torch.randn_like(F.conv2d(x.float(), w, padding=padding)).bfloat16()
    u = TRANSFORM(w, name, PANEL, torch.bfloat16)
    precise = _follow(x, w, bias, residual, padding, True, torch.float64)
    usual = F.conv2d(x, w.bfloat16(), bias.bfloat16(), padding=padding) + residual
    found = CONVOLVE(x, u, bias, residual, name, list(padding), True)
    assert found.dtype == torch.bfloat16
    errors = [float((y.double() - precise).norm()) for y in (usual.relu(), found)]
    assert errors[1] < 2 * errors[0]


def _follow(x: Tensor, w: Tensor, b: Any, r: Any, padding: Any, relu: bool, dtype: Any) -> Tensor:
    x, w, b, r = (None if t is None else t.to(dtype) for t in (x, w, b, r))  # type: ignore[assignment]
    result = F.conv2d(x, w, b, padding=padding)
    result = result if r is None else result + r
    return result.relu() if relu else result


@pytest.mark.parametrize("m", [2, 4])
def test_nan_is_not_lost_in_a_relu_and_stays_in_its_tiles(m: int):
    x = torch.randn(1, LANES, 12, 12)
    x[0, 0, 0, 0] = float("nan")
    name = f"F{m}"
    u = TRANSFORM(torch.randn(PANEL, LANES, 3, 3), name, PANEL, torch.float32)
    found = CONVOLVE(x, u, None, None, name, [1, 1], True)
    assert found[..., :m, :m].isnan().all()
    assert found[..., m:, :].isfinite().all()
    assert found[..., m:].isfinite().all()


def test_eight_threads_at_once():
    model = nn.Conv2d(2 * LANES, PANEL, 3, padding=1)
    u = TRANSFORM(model.weight.detach(), "F2", PANEL, torch.float32)
    bias = model.bias.detach()
    threads_agree(
        lambda x: CONVOLVE(x, u, bias, None, "F2", [1, 1], False), model, 1, 2 * LANES, 20, 20
    )


class Net(nn.Module):
    """A convolution that may be filtered, and what `follow` makes of it."""

    def __init__(self, follow: Callable[["Net", Tensor], Tensor], **settings: Any):
        super().__init__()
        torch.manual_seed(0)
        settings = {"kernel_size": 3, "padding": 1, **settings}
        channels = settings.pop("channels", 2 * PANEL)
        self.conv = nn.Conv2d(channels, channels, **settings)
        self.norm = nn.BatchNorm2d(channels)
        self.norm.running_mean.uniform_(-1, 1)
        self.norm.running_var.uniform_(0.5, 2)
        self.follow = follow

    def forward(self, x: Tensor) -> Tensor:
        return self.follow(self, x)


@pytest.fixture(params=["F2", "F4"])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Arguments of the calls that take a convolution's place; filtering always wins."""
    found: list[Any] = []
    use_winograd = runtime.use_winograd

    def spy(module: Any, reduced: bool) -> bool:
        changed = use_winograd(module, reduced)
        nodes = module.graph.find_nodes(op="call_function", target=CONVOLVE)
        found.extend(node.args for node in nodes)
        return changed

    monkeypatch.setattr(runtime, "use_winograd", spy)
    always(monkeypatch, request.param)
    return found


def images(channels: int = 2 * PANEL, size: int = 10) -> Tensor:
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(1))


FOLLOWERS: dict[str, tuple[Callable[[Net, Tensor], Tensor], bool, bool]] = {
    # what follows; whether a residual and whether a relu become part of the call
    "nothing": (lambda n, x: n.conv(x), False, False),
    "norm": (lambda n, x: n.norm(n.conv(x)), False, False),
    "relu": (lambda n, x: n.norm(n.conv(x)).relu(), False, True),
    "residual": (lambda n, x: (n.norm(n.conv(x)) + x).relu(), True, True),
    "the other way round": (lambda n, x: x.sin() + n.conv(x), True, False),
    "two residuals": (lambda n, x: n.conv(x) + x + x.sin(), True, False),
    "added to itself": (lambda n, x: (lambda y: y + y)(n.conv(x)), False, False),
    "scaled": (lambda n, x: torch.add(n.conv(x), x, alpha=2), False, False),
    "broadcast": (lambda n, x: n.conv(x) + x[:1, :, :1, :1], False, False),
    "read twice": (lambda n, x: (lambda y: y.relu() + y)(n.conv(x)), False, False),
    "relu first": (lambda n, x: n.conv(x).relu() + x, False, True),
    "pool and flatten": (lambda n, x: F.max_pool2d(n.conv(x), 2).flatten(1), False, False),
    "view": (lambda n, x: n.conv(x).relu().view(2, -1), False, True),
    "concatenated": (lambda n, x: torch.cat((n.conv(x), x.relu()), 1), False, False),
}


@pytest.mark.parametrize("name", FOLLOWERS)
def test_what_follows_is_part_of_the_call(name: str, calls: list[Any]):
    follow, residual, relu = FOLLOWERS[name]
    check(Net(follow), images())
    ((_, _, _, added, *_, clamped),) = calls
    assert (added is not None, clamped) == (residual, relu)


def test_images_that_are_channels_last_and_several_sizes(calls: list[Any]):
    net = Net(FOLLOWERS["residual"][0])
    check(net, images().to(memory_format=torch.channels_last))
    check(net, images(size=7), EXACT)
    check(net, images()[:, :, ::2, 1:], EXACT)
    assert len(calls) == 3


@pytest.mark.parametrize(
    "settings",
    [
        {"stride": 2}, {"dilation": 2}, {"groups": 2}, {"kernel_size": (3, 1)},
        {"kernel_size": 7}, {"channels": PANEL - 1}, {"channels": PANEL + 1},
    ],
    ids=str,
)  # fmt: skip
def test_other_convolutions_stay(settings: dict[str, Any], calls: list[Any]):
    channels = settings.get("channels", 2 * PANEL)
    check(Net(FOLLOWERS["relu"][0], **settings), images(channels))
    assert calls == []


@pytest.mark.long
def test_other_types_and_weights_that_are_not_frozen_stay(calls: list[Any]):
    net = Net(FOLLOWERS["relu"][0])
    check(copy.deepcopy(net).double(), images().double())
    check(copy.deepcopy(net).bfloat16(), images().bfloat16())
    check(net, images(), {"freezing": "off"})
    assert calls == []


@needs_bfloat16
@pytest.mark.parametrize("calls", ["F2"], indirect=True)
@pytest.mark.parametrize("name", FOLLOWERS)
def test_convolutions_that_may_be_reduced(name: str, calls: list[Any]):
    follow, residual, relu = FOLLOWERS[name]
    net, x = Net(follow).eval(), images()
    compiled = torch.compile(net, backend="inductor_freezing", options={"precision": "bf16"})
    with torch.no_grad():
        expected, found = net(x), compiled(x)
    assert 1e-4 < float((found - expected).norm() / expected.norm()) < 0.01
    assert found.dtype == torch.float32
    ((_, weight, bias, added, *_, clamped),) = calls
    assert weight.meta["val"].dtype == torch.bfloat16
    assert bias.meta["val"].dtype == torch.float32
    assert weight.args[0].meta["val"].dtype == torch.float32, "it is rounded only once"
    widened = name in ("residual", "the other way round", "two residuals")  # of float32 numbers
    assert (added is not None, clamped) == (residual and not widened, relu and not widened)


def test_nothing_changes_where_torch_is_to_be_deterministic(calls: list[Any]):
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        check(Net(FOLLOWERS["relu"][0]), images())
    finally:
        torch.use_deterministic_algorithms(before)
    assert calls == []


def test_changed_weights_are_transformed_again(calls: list[Any]):
    net = Net(FOLLOWERS["residual"][0])
    compiled = check(net, images())
    with torch.no_grad():
        net.conv.weight.mul_(2)
        torch.testing.assert_close(compiled(images()), net(images()), rtol=1e-4, atol=1e-4)
    assert len(calls) == 2


def test_the_choice_is_measured_against_onednn(monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []

    def fastest(kind: str, usual: str, make: Any, layouts: Any, **_: Any) -> str:
        ((shape, strides, dtype),) = layouts
        x = torch.empty_strided(shape, strides, dtype=dtype).normal_()
        results = {name: run([x])[0] for name, run in make().items()}
        for result in results.values():
            torch.testing.assert_close(result, results[usual], rtol=1e-4, atol=1e-3)
        seen.append((kind, usual, set(results)))
        return usual

    monkeypatch.setattr(winograd, "fastest", fastest)
    check(Net(FOLLOWERS["relu"][0]), images())
    channels = 2 * PANEL
    check(Net(FOLLOWERS["relu"][0], kernel_size=5, padding=2), images())
    kinds = [f"convolution ({channels}, {channels}, {n}, {n}) {[n // 2] * 2}" for n in (3, 5)]
    ways = [{"direct", "F2", "F4"}, {"direct", "F2_OF_5"}]
    assert seen == [(kind, "direct", names) for kind, names in zip(kinds, ways, strict=True)]


def test_a_kernel_of_five_by_five(monkeypatch: pytest.MonkeyPatch):
    always(monkeypatch, "F2_OF_5")
    check(Net(FOLLOWERS["residual"][0], kernel_size=5, padding=2), images())

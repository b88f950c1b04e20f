"""Convolutions that read few channels: the operators, and where Inductor's graphs call them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynamo_backends._torch_private import meets_benchmark_accuracy
from dynamo_backends.inductor import runtime
from dynamo_backends.kernels import small_channels
from dynamo_backends.kernels.small_channels import (
    CONVOLVE,
    CONVOLVE_IN_GROUPS,
    PACK,
    PACK_GROUPS,
)
from tests.backend_checks import threads_agree
from tests.inductor.checking import EXACT, check
from tests.kernels.planted import always

LIBRARY = small_channels._library(False, torch.float32)
LANES, PANEL = LIBRARY.lanes(), LIBRARY.panel()
LAYOUTS = [torch.contiguous_format, torch.channels_last]

needs_bfloat16 = pytest.mark.skipif(
    not LIBRARY.has_bfloat16(), reason="this processor has no products of bfloat16"
)
needs_groups = pytest.mark.skipif(
    not LIBRARY.has_groups(), reason="vectors of this processor are not permuted here"
)
TYPES = [
    pytest.param(torch.float32, id="float32"),
    pytest.param(torch.bfloat16, id="bfloat16", marks=needs_bfloat16),
]
POOLS = {
    "no pool": None,
    "3x3": {"kernel_size": 3, "stride": 2, "padding": 1},
    "windows apart": {"kernel_size": 2, "stride": 3},
    "windows that share much": {"kernel_size": (4, 3), "stride": 1, "padding": (2, 1)},
    "ceiled": {"kernel_size": 3, "stride": 2, "ceil_mode": True},
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def follow(
    x: Tensor, w: Tensor, b: Tensor | None, settings: Any, relu: bool, pool: Any, dtype: Any
) -> Tensor:
    """What the operators compute, by ATen in some type."""
    x, w, b = (None if t is None else t.to(dtype) for t in (x, w, b))  # type: ignore[assignment]
    result = F.conv2d(x, w, b, **settings)
    result = result.relu() if relu else result
    return result if pool is None else F.max_pool2d(result, **pool)


def pool_of(result: Tensor, pool: Any) -> list[int]:
    """As the operators are told of it."""
    if pool is None:
        return []
    pairs = [pool["kernel_size"], pool["stride"], pool.get("padding", 0)]
    pairs = [(n, n) if isinstance(n, int) else n for n in pairs]
    return [n for pair in (*pairs, result.shape[2:]) for n in pair]


def agree(
    x: Tensor, w: Tensor, bias: Any, settings: Any, relu: bool, pool: Any, dtype: torch.dtype
) -> None:
    """An operator errs no more than ATen's kernels."""
    padding, stride = (
        [n, n] if isinstance(n, int) else list(n) for n in (settings["padding"], settings["stride"])
    )
    x, rounded = (t.to(dtype).float() for t in (x, w))
    precise = follow(x, rounded, bias, settings, relu, pool, torch.float64)
    usual = follow(x, rounded, bias, settings, relu, pool, torch.float32)
    groups = settings.get("groups", 1)
    pack, count, convolve = (
        (PACK, PANEL, CONVOLVE) if groups == 1 else (PACK_GROUPS, LANES, CONVOLVE_IN_GROUPS)
    )
    rest = (bias, list(w.shape[2:]), stride, padding, relu, pool_of(precise, pool))
    for layout in LAYOUTS:
        for source in {torch.float32, dtype} if groups == 1 else {dtype}:
            given = x.to(source).to(memory_format=layout)
            found = convolve(given, pack(w, count, dtype), *rest)
            assert found.dtype == dtype
            assert found.is_contiguous(memory_format=torch.channels_last)
            if dtype == torch.float32:
                assert meets_benchmark_accuracy(usual, found, precise, tol=1e-4)
            else:  # sums are float32, and rounded once
                torch.testing.assert_close(found, usual.to(dtype), rtol=2**-7, atol=1e-4)


IMAGES = [  # batch, channels, height, width, panels, window, stride, padding
    (2, 3, 32, 30, 1, (7, 7), 2, 3),
    (1, 3, 70, 67, 2, (11, 11), 4, 2),  # rows of 32 pixels and some more are interleaved
    (3, 1, 9, 13, 1, (3, 5), 1, (0, 2)),
    (1, 4, 8, 8, 1, (3, 3), (2, 1), 1),
    (2, 2, 5, 40, 1, (1, 1), 1, 0),
    (1, 3, 2, 1, 2, (3, 3), 1, 1),
    (2, 3, 260, 100, 1, (3, 3), 2, 1),  # strips
    (1, 3, 9, 20, 1, (3, 3), 1, 4),  # windows that see the padding only
]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("relu", [False, True], ids=["", "relu"])
@pytest.mark.parametrize("shape", IMAGES, ids=str)
def test_images(shape: Any, relu: bool, dtype: torch.dtype):
    batch, channels, height, width, panels, window, stride, padding = shape
    x, w = draw(batch, channels, height, width), draw(panels * PANEL, channels, *window, seed=1)
    settings = {"stride": stride, "padding": padding}
    for bias in (None, draw(len(w), seed=2)):
        agree(x, w, bias, settings, relu, None, dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("size", [(64, 50), (300, 9)], ids=str)
def test_a_max_pool_after_it(size: tuple[int, int], name: str, dtype: torch.dtype):
    x, w = draw(2, 3, *size), draw(PANEL, 3, 7, 7, seed=1)
    agree(x, w, draw(PANEL, seed=2), {"stride": 2, "padding": 3}, True, POOLS[name], dtype)


@needs_groups
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("stride", [1, 2, (3, 1)], ids=str)
@pytest.mark.parametrize("channels", small_channels._CHANNELS)
def test_groups(channels: int, stride: Any, dtype: torch.dtype):
    settings = {"stride": stride, "padding": 1, "groups": 2 * LANES // channels}
    w = draw(2 * LANES, channels, 3, 3, seed=1)
    for size in ((13, 17), (1, 1), (4, 8)):
        agree(draw(2, 2 * LANES, *size), w, draw(len(w), seed=2), settings, True, None, dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_not_finite_stays_in_the_windows_that_see_it(dtype: torch.dtype):
    x, w = draw(1, 3, 12, 40), draw(PANEL, 3, 3, 3, seed=1)
    x[0, 2, 5, 10], x[0, 0, 5, 36] = float("nan"), float("inf")
    usual = F.conv2d(x, w, padding=1)
    args = (None, [3, 3], [1, 1], [1, 1])
    found = CONVOLVE(x, PACK(w, PANEL, dtype), *args, False, [])
    assert torch.equal(found.isfinite(), usual.isfinite())
    relu, pool = True, [3, 3, 2, 2, 1, 1, 6, 20]
    found = CONVOLVE(x, PACK(w, PANEL, dtype), *args, relu, pool)
    has_nan = F.max_pool2d(usual.relu(), 3, 2, 1).isnan()
    assert has_nan.any()
    assert found[has_nan].isnan().all()


@needs_bfloat16
def test_float32_images_are_rounded_as_torch_does():
    x = torch.tensor([1.0 + 2**-8, 1.0 + 3 * 2**-8, -1e-3, 3e38, 3.4e38, 0.0]).repeat(1, 3, 1, 16)
    w = torch.zeros(PANEL, 3, 1, 1)
    w[:3, :, 0, 0] = torch.eye(3)
    found = CONVOLVE(x, PACK(w, PANEL, torch.bfloat16), None, [1, 1], [1, 1], [0, 0], False, [])
    expected = F.conv2d(x.bfloat16().float(), w)  # infinity times zero is not a number
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=0, equal_nan=True)


def test_eight_threads_at_once():
    model = nn.Conv2d(3, PANEL, 3, padding=1)
    packed, bias = PACK(model.weight.detach(), PANEL, torch.float32), model.bias.detach()
    rest = (bias, [3, 3], [1, 1], [1, 1], False, [])
    threads_agree(lambda x: CONVOLVE(x, packed, *rest), model, 1, 3, 20, 20)


# Graphs.


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that take a convolution's place; they always win."""
    found: list[Any] = []
    use_small_channels = runtime.use_small_channels

    def spy(module: Any) -> bool:
        changed = use_small_channels(module)
        for target in (CONVOLVE, CONVOLVE_IN_GROUPS):
            found.extend(module.graph.find_nodes(op="call_function", target=target))
        return changed

    monkeypatch.setattr(runtime, "use_small_channels", spy)
    always(monkeypatch, "few channels")
    return found


class Net(nn.Module):
    """A convolution, and what `follow` makes of it."""

    def __init__(self, follow: Callable[["Net", Tensor], Tensor], **settings: Any):
        super().__init__()
        torch.manual_seed(0)
        usual = {"in_channels": 3, "out_channels": 2 * PANEL, "kernel_size": 3, "padding": 1}
        settings = {**usual, **settings}
        self.conv = nn.Conv2d(**settings)
        self.norm = nn.BatchNorm2d(settings["out_channels"])
        self.norm.running_mean.uniform_(-1, 1)
        self.norm.running_var.uniform_(0.5, 2)
        self.follow = follow

    def forward(self, x: Tensor) -> Tensor:
        return self.follow(self, x)


def stem(net: Net, x: Tensor) -> Tensor:
    return F.max_pool2d(net.norm(net.conv(x)).relu(), 3, 2, 1)


FOLLOWERS: dict[str, tuple[Callable[[Net, Tensor], Tensor], bool, bool]] = {
    # what follows; whether a relu and whether a pool become part of the call
    "nothing": (lambda n, x: n.conv(x), False, False),
    "norm": (lambda n, x: n.norm(n.conv(x)), False, False),
    "relu": (lambda n, x: n.norm(n.conv(x)).relu(), True, False),
    "stem": (stem, True, True),
    "pool only": (lambda n, x: F.max_pool2d(n.conv(x), 2), False, True),
    "pool of a column": (lambda n, x: F.max_pool2d(n.conv(x), (2, 1)), False, True),
    "read twice": (lambda n, x: (lambda y: y.relu() + y)(n.conv(x)), False, False),
    "pool and more": (lambda n, x: (lambda y: F.max_pool2d(y, 2).sum() + y)(n.conv(x).relu()),
                      True, False),
    "dilated pool": (lambda n, x: F.max_pool2d(n.conv(x).relu(), 2, dilation=2), True, False),
    "high pool": (lambda n, x: F.max_pool2d(n.conv(x).relu(), (9, 1), 1), True, False),
    "places": (lambda n, x: F.max_pool2d(n.conv(x), 2, return_indices=True)[1] * 1.0, False, False),
    "added": (lambda n, x: n.conv(x) + x.sum(), False, False),
    "view": (lambda n, x: n.conv(x).relu().view(2, -1), True, False),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLLOWERS)
def test_what_follows_is_part_of_the_call(name: str, calls: list[Any]):
    follow, relu, pool = FOLLOWERS[name]
    check(Net(follow), draw(2, 3, 20, 22))
    (call,) = calls
    *_, clamped, pooled = call.args
    assert (clamped, bool(pooled)) == (relu, pool)


@needs_groups
def test_groups_in_a_graph(calls: list[Any]):
    grouped = {"in_channels": 2 * PANEL, "groups": 2 * PANEL // 4}
    check(Net(stem, **grouped), draw(2, 2 * PANEL, 10, 11))
    (call,) = calls
    assert call.target is CONVOLVE_IN_GROUPS
    assert not call.args[-1], "pools after groups are not part of the call"


@pytest.mark.parametrize(
    "settings",
    [
        {"in_channels": 5}, {"out_channels": PANEL + 1}, {"dilation": 2},
        {"in_channels": 2 * PANEL, "groups": 2 * PANEL},
        {"in_channels": 2 * PANEL, "groups": PANEL // 8},
        {"in_channels": 2 * PANEL, "groups": PANEL // 2, "kernel_size": 5},
        {"in_channels": 2 * PANEL, "groups": PANEL // 2, "stride": 3},
    ],
    ids=str,
)  # fmt: skip
def test_other_convolutions_stay(settings: dict[str, Any], calls: list[Any]):
    check(Net(FOLLOWERS["relu"][0], **settings), draw(2, settings.get("in_channels", 3), 12, 12))
    assert calls == []


def test_float64_and_weights_that_are_not_frozen_stay(calls: list[Any]):
    check(Net(stem).double(), draw(2, 3, 12, 12).double())
    check(Net(stem), draw(2, 3, 12, 12), {"freezing": "off"})
    assert calls == []


def test_images_of_several_layouts_and_sizes(calls: list[Any]):
    net = Net(stem)
    check(net, draw(2, 3, 12, 12).to(memory_format=torch.channels_last))
    check(net, draw(2, 3, 15, 9), EXACT)
    check(net, draw(2, 6, 24, 12)[:, ::2, ::2], EXACT)
    check(net, draw(1, 3, 1, 12).expand(2, 3, 8, 12), EXACT)
    assert len(calls) == 4


@needs_bfloat16
@pytest.mark.parametrize("name", ["stem", "relu", "pool and more"])
def test_images_are_rounded_by_the_kernel(name: str, calls: list[Any]):
    follow, *_ = FOLLOWERS[name]
    net, x = Net(follow).eval(), draw(2, 3, 20, 22)
    compiled = torch.compile(net, backend="inductor_freezing", options={"precision": "bf16"})
    with torch.no_grad():
        expected, found = net(x), compiled(x)
    assert 1e-4 < float((found - expected).norm() / expected.norm()) < 0.01
    assert found.dtype == torch.float32
    (call,) = calls
    image, packed, bias, *_ = call.args
    types = [n.meta["val"].dtype for n in (image, packed, packed.args[0], bias)]
    assert types == [torch.float32, torch.bfloat16, torch.float32, torch.float32]


@needs_bfloat16
def test_models_in_bfloat16(calls: list[Any]):
    net, x = Net(stem).eval().bfloat16(), draw(2, 3, 20, 22).bfloat16()
    compiled = torch.compile(net, backend="inductor_freezing")
    with torch.no_grad():
        expected, found = net(x), compiled(x)
        precise = net.double()(x.double())
    assert meets_benchmark_accuracy(expected, found, precise, tol=1e-2)
    assert len(calls) == 1


def test_nothing_changes_where_torch_is_to_be_deterministic(calls: list[Any]):
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        check(Net(stem), draw(2, 3, 12, 12))
    finally:
        torch.use_deterministic_algorithms(before)
    assert calls == []


def test_changed_weights_are_packed_again(calls: list[Any]):
    net, x = Net(stem), draw(2, 3, 12, 12)
    compiled = check(net, x)
    with torch.no_grad():
        net.conv.weight.mul_(2)
        torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-4)
    assert len(calls) == 2


@pytest.mark.parametrize("precision", ["float32", pytest.param("bf16", marks=needs_bfloat16)])
@pytest.mark.parametrize("groups", [1, pytest.param(PANEL // 2, marks=needs_groups)])
def test_the_choice_is_measured_against_onednn(
    groups: int, precision: str, monkeypatch: pytest.MonkeyPatch
):
    seen: list[Any] = []

    def fastest(
        kind: str, usual: str, make: Any, layouts: Any, preferred: str | None = None
    ) -> str:
        ((shape, strides, dtype),) = layouts
        x = torch.empty_strided(shape, strides, dtype=dtype).fill_(1.0)
        results = {name: run([x])[0] for name, run in make().items()}
        for result in results.values():
            torch.testing.assert_close(result, results[usual], rtol=1e-4, atol=1e-3)
        seen.append((usual, preferred, set(results), dtype))
        return usual

    monkeypatch.setattr(small_channels, "fastest", fastest)
    channels = 3 if groups == 1 else 2 * PANEL
    net = Net(stem, in_channels=channels, groups=groups).eval()
    compiled = torch.compile(net, backend="inductor_freezing", options={"precision": precision})
    with torch.no_grad():
        compiled(draw(2, channels, 20, 20))
    preferred = "few channels" if groups == 1 else "oneDNN"  # a pool is part of the call
    source = torch.bfloat16 if groups > 1 and precision == "bf16" else torch.float32
    assert seen == [("oneDNN", preferred, {"oneDNN", "few channels"}, source)]

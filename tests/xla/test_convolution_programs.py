"""Every convolution program, and the choice among them, against torch in float64."""

import itertools
import math
from functools import partial

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_backends.xla.lowering import convolution_nhwc as programs
from dynamo_backends.xla.lowering import convolution_weight_gradient
from dynamo_backends.xla.lowering import pooling_nhwc as pooling
from dynamo_backends.xla.lowering.convolution_nhwc import PROGRAMS, RULES, ConvShape

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CONV_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
TOLERANCE = {
    torch.float32: 5e-6,
    torch.float64: 1e-13,
    torch.bfloat16: 1e-2,
    torch.float16: 2e-3,
    torch.complex64: 5e-6,
}


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def to_jax(t: torch.Tensor) -> jax.Array:
    """torch's channels first to channels last; weights are passed through `raw` instead."""
    return raw(t.movedim(1, -1))


def raw(t: torch.Tensor) -> jax.Array:
    name = str(t.dtype).removeprefix("torch.")
    if t.dtype in (torch.bfloat16, torch.float16):
        return jax.numpy.asarray(t.float().contiguous().numpy()).astype(name)
    return jax.numpy.asarray(t.contiguous().numpy())


def to_torch(a: jax.Array) -> torch.Tensor:
    if a.dtype in (jax.numpy.bfloat16, jax.numpy.float16):
        a = a.astype("float32")
    return torch.from_numpy(np.array(a)).movedim(-1, 1)


def assert_close(got: jax.Array, want: torch.Tensor, dtype: torch.dtype, tolerance=None) -> None:
    assert str(got.dtype) == str(dtype).removeprefix("torch.")
    got = to_torch(got)
    assert got.shape == want.shape
    if not dtype.is_floating_point and not dtype.is_complex:
        assert torch.equal(got, want)
        return
    if want.numel() == 0:
        return
    got, scale = got.to(want.dtype), max(want.abs().max().item(), 1e-30)
    assert (got - want).abs().max().item() / scale <= (tolerance or TOLERANCE[dtype])


def wide(t: torch.Tensor) -> torch.Tensor:
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def random_tensor(shape, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        wider = torch.float64 if dtype == torch.float64 else torch.float32
        wider = dtype if dtype.is_complex else wider
        return torch.randn(shape, dtype=wider, generator=generator).to(dtype)
    return torch.randint(-5, 6, shape, dtype=dtype, generator=generator)


@st.composite
def convolutions(draw, max_dims=3):
    """Arguments of a valid convolution: spatial, kernel, …, biased to what rules tell apart."""
    n = draw(st.integers(1, max_dims))
    each = lambda values: tuple(draw(st.sampled_from(values)) for _ in range(n))  # noqa: E731
    kernel = draw(st.sampled_from([(1,) * n, (2,) * n, (3,) * n, each([1, 2, 3, 4, 5])]))
    stride = draw(st.sampled_from([(1,) * n, (2,) * n, kernel, each([1, 2, 3])]))
    padding = draw(st.sampled_from([(0,) * n, (1,) * n, each([0, 1, 2, 4])]))
    dilation = draw(st.sampled_from([(1,) * n, each([1, 2, 3])]))
    least = [
        max(1, d * (k - 1) + 1 - 2 * p) for k, d, p in zip(kernel, dilation, padding, strict=True)
    ]
    spatial = tuple(draw(st.integers(low, low + (11, 7, 4)[n - 1])) for low in least)
    groups, per_in, per_out = draw(
        st.sampled_from([(1, 1, 1), (1, 3, 5), (1, 8, 4), (2, 3, 2), (4, 5, 1), (6, 1, 1)])
        | st.sampled_from([(8, 1, 1), (8, 1, 2), (8, 4, 3), (16, 2, 2), (4, 8, 8)])
    )
    batch = draw(st.sampled_from([0, 1, 2, 3]))
    return {
        "x": (batch, groups * per_in, *spatial),
        "w": (groups * per_out, per_in, *kernel),
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
        "seed": draw(st.integers(0, 2**16)),
    }


def split(case):
    generator = torch.Generator().manual_seed(case["seed"])
    options = {k: case[k] for k in ("stride", "padding", "dilation", "groups")}
    return generator, options, len(case["w"]) - 2


DTYPES = st.sampled_from([*TOLERANCE, torch.int32, torch.int64])


def reference(function, x, w, **options) -> torch.Tensor:
    """In double precision, which is exact for the small integers drawn here."""
    want = function(wide(x), wide(w), **options)
    return want if x.is_floating_point() or x.is_complex() else want.to(x.dtype)


def run(function, *arrays, **options):
    return jax.jit(lambda *a: function(*a, **options))(*arrays)


@settings(max_examples=12, deadline=None, print_blob=True)
@given(convolutions(), DTYPES)
def test_convolve_matches_torch(case, dtype):
    generator, options, n = split(case)
    x, w = (random_tensor(case[k], dtype, generator) for k in "xw")
    got = run(programs.convolve, to_jax(x), raw(w), **options)
    assert_close(got, reference(CONV[n], x, w, **options), dtype)


@settings(max_examples=12, deadline=None, print_blob=True)
@given(convolutions())
def test_every_program_that_applies_matches_torch(case):
    generator, options, n = split(case)
    x, w = (random_tensor(case[k], torch.float32, generator) for k in "xw")
    shape = ConvShape.of(to_jax(x), raw(w), **options)
    want = CONV[n](wide(x), wide(w), **options)
    for program in PROGRAMS:
        if not shape.is_empty and program.applies(shape):
            prepared = program.prepare(raw(w), shape)
            got = run(partial(program.apply, shape=shape), to_jax(x), prepared)
            assert_close(got, want, torch.float32, 2e-5)


@pytest.mark.parametrize(("name", "bound"), [("winograd_f2", 1e-5), ("winograd_f4", 2e-5)])
@pytest.mark.parametrize(
    ("channels", "size", "padding"), [(64, 56, 1), (512, 7, 1), (130, 13, 0), (16, 3, 2), (5, 1, 1)]
)
def test_winograd_is_accurate_where_tiles_do_not_fit(name, bound, channels, size, padding):
    generator = torch.Generator().manual_seed(channels)
    x = torch.randn(2, channels, size, size, generator=generator)
    w = torch.randn(channels + 3, channels, 3, 3, generator=generator)
    options = {"stride": (1, 1), "padding": (padding,) * 2, "dilation": (1, 1), "groups": 1}
    shape = ConvShape.of(to_jax(x), raw(w), **options)
    program = next(p for p in PROGRAMS if p.name == name)
    got = jax.jit(lambda x, w: program(x, w, shape))(to_jax(x), raw(w))
    assert_close(got, F.conv2d(x.double(), w.double(), padding=padding), torch.float32, bound)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16", "complex64", "int32"])
def test_winograd_is_for_float32_only(dtype):
    shape = ConvShape(4, (28, 28), 128, 128, (3, 3), (1, 1), (1, 1), (1, 1), dtype=dtype)
    assert not any(p.applies(shape) for p in PROGRAMS if p.name.startswith("winograd"))
    float32 = ConvShape(4, (28, 28), 128, 128, (3, 3), (1, 1), (1, 1), (1, 1))
    assert programs.choose_algorithm(float32).name.startswith("winograd")


@settings(max_examples=12, deadline=None, print_blob=True)
@given(convolutions(), DTYPES, st.data())
def test_convolve_transposed_matches_torch(case, dtype, data):
    generator, options, n = split(case)
    limits = [max(s, d) - 1 for s, d in zip(options["stride"], options["dilation"], strict=True)]
    options["output_padding"] = tuple(data.draw(st.integers(0, high)) for high in limits)
    groups, w_shape = options["groups"], case["w"]
    x = random_tensor(case["x"], dtype, generator)
    w = random_tensor((case["x"][1], w_shape[0] // groups, *w_shape[2:]), dtype, generator)
    sizes = [
        (size - 1) * s - 2 * p + d * (k - 1) + extra + 1
        for size, s, p, d, k, extra in zip(
            case["x"][2:],
            options["stride"],
            options["padding"],
            options["dilation"],
            w_shape[2:],
            options["output_padding"],
            strict=True,
        )
    ]
    if min(sizes) < 1:
        return
    got = run(programs.convolve_transposed, to_jax(x), raw(w), **options)
    assert_close(got, reference(CONV_TRANSPOSED[n], x, w, **options), dtype)


GRADIENT_DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


@settings(max_examples=12, deadline=None, print_blob=True)
@given(convolutions(), GRADIENT_DTYPES, st.sampled_from(["cpu", "cuda"]))
def test_gradients_match_autograd(case, dtype, platform):
    generator, options, n = split(case)
    x, w = (random_tensor(case[k], dtype, generator) for k in "xw")
    x64, w64 = (t.to(torch.float64, copy=True).requires_grad_() for t in (x, w))
    y = CONV[n](x64, w64, **options)
    dy = random_tensor(y.shape, dtype, generator)
    want_x, want_w = torch.autograd.grad(y, (x64, w64), dy.double())
    spatial, kernel = case["x"][2:], case["w"][2:]
    options["platform"] = platform
    got_x = run(programs.grad_input, to_jax(dy), raw(w), input_spatial=spatial, **options)
    got_w = run(programs.grad_weight, to_jax(x), to_jax(dy), kernel=kernel, **options)
    assert_close(got_x, want_x, dtype, 2e-5 if dtype == torch.float32 else None)
    got_w = jax.numpy.moveaxis(got_w, 1, -1)  # `assert_close` expects channels last
    assert_close(got_w, want_w, dtype, 2e-5 if dtype == torch.float32 else None)


@pytest.mark.parametrize(
    ("at_once", "largest"),
    [(1 << 30, 1 << 30), (2 * 7000, 1 << 30), (0, 1 << 30), (0, 0)],
    ids=["all images", "some images", "one image", "XLA's convolution"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradient_in_parts(monkeypatch, at_once, largest, dtype):
    monkeypatch.setattr(convolution_weight_gradient, "_COLUMNS", at_once)
    monkeypatch.setattr(convolution_weight_gradient, "_LARGEST_IMAGE", largest)
    generator = torch.Generator().manual_seed(0)
    x = random_tensor((6, 5, 9, 8), dtype, generator)
    dy = random_tensor((6, 7, 5, 7), dtype, generator)
    options = {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 1), "groups": 1}
    want = torch.nn.grad.conv2d_weight(x.double(), (7, 5, 3, 2), dy.double(), **options)
    got = run(programs.grad_weight, to_jax(x), to_jax(dy), kernel=(3, 2), **options)
    tolerance = 2e-5 if dtype == torch.float32 else None
    assert_close(jax.numpy.moveaxis(got, 1, -1), want, dtype, tolerance)


def test_other_platforms_take_the_plain_program():
    shape = ConvShape(4, (28, 28), 96, 96, (3, 3), (1, 1), (1, 1), (1, 1), 96, platform="cuda")
    assert programs.choose_algorithm(shape).name == "lax"


def test_rules_name_every_program_and_end_with_one_that_always_fits():
    assert {rule.program.name for rule in RULES} == {program.name for program in PROGRAMS}
    odd = ConvShape(1, (9, 9, 9, 9), 5, 7, (2, 3, 2, 1), (1, 2, 1, 1), (0, 1, 0, 0), (1, 1, 2, 1))
    assert RULES[-1].program.applies(odd)
    assert RULES[-1].when(odd)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stride": (1,)}, r"needs 2 values for stride, got \(1,\)"),
        ({"groups": 3}, "do not fit a weight of 4 input channels in each of 3 groups"),
        ({"dilation": (4, 1)}, r"dilation \(4, 1\) is larger than the padded input \(6, 6\)"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    x, w = np.zeros((1, 6, 6, 4), "float32"), np.zeros((6, 4, 3, 3), "float32")
    options = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
    with pytest.raises(ValueError, match=message):
        programs.convolve(x, w, **{**options, **change})


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_weights_can_be_prepared_ahead(program):
    """`prepare` reads the weight only, so its outputs are constants of a call."""
    cases = [
        ConvShape(2, (8, 8), 8, 8, (3, 3), (1, 1), (1, 1), (1, 1)),
        ConvShape(2, (8, 8), 8, 8, (1, 1), (1, 1), (0, 0), (1, 1)),
        ConvShape(2, (8, 8), 8, 8, (2, 2), (2, 2), (0, 0), (1, 1)),
        ConvShape(2, (8, 8), 8, 8, (3, 3), (2, 2), (1, 1), (1, 1), groups=4),
    ]
    shape = next(s for s in cases if program.applies(s))
    w_shape = (shape.out_channels, shape.in_per_group, *shape.kernel)
    w = jax.random.normal(jax.random.key(0), w_shape, "float32")
    x = jax.random.normal(jax.random.key(1), (2, 8, 8, 8), "float32")
    prepared = jax.jit(lambda w: program.prepare(w, shape))(w)
    apart = jax.jit(lambda x, p: program.apply(x, p, shape))(x, prepared)
    assert apart.shape == shape.out_shape
    together = jax.jit(lambda x, w: program(x, w, shape))(x, w)
    np.testing.assert_allclose(apart, together, atol=1e-4)


# --- pooling --------------------------------------------------------------------------------------

MAX_POOL = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVG_POOL = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


@st.composite
def pools(draw, dilated):
    n = draw(st.integers(1, 3))
    kernel = tuple(draw(st.integers(1, 5)) for _ in range(n))
    dilation = tuple(draw(st.integers(1, 2)) if dilated else 1 for _ in range(n))
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    stride = tuple(draw(st.integers(1, 4)) for _ in range(n))
    least = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    spatial = tuple(draw(st.integers(low, low + 6)) for low in least)
    seed = draw(st.integers(0, 2**16))
    return (draw(st.sampled_from([0, 2])), 3, *spatial), kernel, stride, padding, dilation, seed


@settings(max_examples=12, deadline=None, print_blob=True)
@given(
    pools(True),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64]),
    st.sampled_from(["plain", "ties", "nan", "-inf"]),
)
def test_max_pool_matches_torch(case, ceil_mode, dtype, kind):
    shape, kernel, stride, padding, dilation, seed = case
    n, generator = len(kernel), torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point and n != 2:
        dtype = torch.float32  # torch pools integers in two dimensions only
    x = random_tensor(shape, dtype, generator)
    if kind != "plain":
        x = (x * 2).round() if dtype.is_floating_point else x // 2
    if kind in ("nan", "-inf") and dtype.is_floating_point:
        x = torch.where(torch.rand(shape, generator=generator) < 0.3, float(kind), x)
    want, want_at = MAX_POOL[n](
        x, kernel, stride, padding, dilation, ceil_mode=ceil_mode, return_indices=True
    )
    windows, x = pooling.Windows(kernel, stride, padding, dilation, ceil_mode), to_jax(x)
    got = to_torch(jax.jit(lambda x: pooling.max_pool_nhwc(x, windows))(x))
    torch.testing.assert_close(got.to(dtype), want, rtol=0, atol=0, equal_nan=True)
    got, at = jax.jit(lambda x: pooling.max_pool_with_indices_nhwc(x, windows))(x)
    torch.testing.assert_close(to_torch(got).to(dtype), want, rtol=0, atol=0, equal_nan=True)
    assert at.dtype == np.int64
    assert torch.equal(to_torch(at), want_at)


@settings(max_examples=12, deadline=None, print_blob=True)
@given(
    pools(False),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 1, 5]),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64]),
)
def test_avg_pool_matches_torch(case, ceil_mode, include, override, dtype):
    shape, kernel, stride, padding, _, seed = case
    n = len(kernel)
    if dtype == torch.int64 and (n != 2 or padding != (0, 0)):
        dtype = torch.float32
    x = random_tensor(shape, dtype, torch.Generator().manual_seed(seed))
    extra = {"divisor_override": override} if n > 1 else {}
    exact = x.double() if dtype.is_floating_point else x
    want = AVG_POOL[n](exact, kernel, stride, padding, ceil_mode, include, **extra)
    divisor = extra.get("divisor_override")
    windows = pooling.Windows.of(n, kernel, stride, padding, ceil_mode=ceil_mode)
    got = jax.jit(lambda x: pooling.avg_pool_nhwc(x, windows, include, divisor))(to_jax(x))
    assert_close(got, want, dtype)


def test_max_pool_is_the_same_taken_apart_by_dimension():
    x = np.random.default_rng(0).standard_normal((2, 20, 21, 3)).astype("float32")
    kernel = (13, 13)
    assert math.prod(kernel) > pooling._SEPARATE_FROM
    got = pooling.max_pool_nhwc(x, pooling.Windows.of(2, kernel, 1, 6))
    want = F.max_pool2d(torch.from_numpy(x).movedim(-1, 1), kernel, 1, 6)
    assert torch.equal(to_torch(got), want)


def test_pooled_size_matches_torch_exhaustively():
    for size, k, s, p, ceil in itertools.product(
        range(3, 9), (1, 2, 3), (1, 2, 3, 4), (0, 1), (False, True)
    ):
        if 2 * p > k:
            continue
        want = F.max_pool1d(torch.zeros(1, 1, size), k, s, p, ceil_mode=ceil).shape[-1]
        assert pooling.pooled_size(size, k, s, p, 1, ceil) == want

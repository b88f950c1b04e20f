"""Traps of elementwise semantics: promotion, rounding, NaN, signed zeros, integer overflow."""

import math
import operator

import pytest
import torch
import torch.nn.functional as F

from dynamo_backends.xla.lowering import registry
from tests.xla.harness import capture, run

NAN, INF = math.nan, math.inf
SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 1e6, INF, -INF, NAN])


def assert_equals_eager(fn, *args, exact=True):
    (result,), expected = run(fn, *args), fn(*args)
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-6, "atol": 1e-7}
    torch.testing.assert_close(result, expected, equal_nan=True, **tolerance)
    if result.is_floating_point() and exact:  # assert_close takes -0.0 for 0.0
        known = ~expected.isnan()
        assert torch.equal(result.signbit() & known, expected.signbit() & known)


@pytest.mark.parametrize(
    "fn",
    [
        torch.sign,
        torch.neg,
        torch.abs,
        torch.floor,
        torch.ceil,
        torch.trunc,
        torch.round,
        torch.signbit,
        torch.isnan,
        torch.isinf,
        torch.logical_not,
        pytest.param(
            torch.frac,
            marks=pytest.mark.skipif(
                torch.__version__ < "2.13",
                reason="torch takes it apart so that it gives -0.0 there",
            ),
        ),
        torch.sgn,
        torch.angle,
        torch.nan_to_num,
        lambda x: torch.clamp(x, -1, 1),
        lambda x: torch.clamp(x, 1, -1),
        lambda x: torch.clamp(x, min=NAN),
    ],
)
def test_unary_on_special_values(fn):
    assert_equals_eager(fn, SPECIAL)


@pytest.mark.parametrize(
    "fn",
    [
        torch.maximum,
        torch.minimum,
        torch.fmax,
        torch.fmin,
        torch.copysign,
        torch.fmod,
        torch.remainder,
        torch.nextafter,
        torch.eq,
        torch.ne,
        torch.lt,
        torch.ge,
        torch.logical_xor,
        lambda x, y: torch.div(x, y, rounding_mode="floor"),
        lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    ],
)
def test_binary_on_special_values(fn):
    x, y = (a.flatten() for a in torch.meshgrid(SPECIAL, SPECIAL, indexing="ij"))
    if fn in (torch.maximum, torch.minimum, torch.fmax, torch.fmin):
        different = (x != y) | x.isnan()  # IEEE 754 leaves open which of 0.0 and -0.0 is larger
        x, y = x[different], y[different]
    assert_equals_eager(fn, x, y)


@pytest.mark.parametrize("fn", [torch.pow, torch.atan2, torch.hypot])
def test_transcendental_on_special_values(fn):
    x, y = torch.meshgrid(SPECIAL, SPECIAL, indexing="ij")
    assert_equals_eager(fn, x.contiguous(), y.contiguous(), exact=False)


@pytest.mark.parametrize("divisor", [3.0, 41.0, 47.0, 0.1])
@pytest.mark.parametrize("mode", [None, "floor", "trunc"])
def test_division_by_a_constant_is_not_a_multiplication_by_its_reciprocal(divisor, mode):
    x = torch.arange(1, 3000.0) * divisor
    assert_equals_eager(lambda x: torch.div(x, divisor, rounding_mode=mode), x)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize("divisor", [3, -3, 7])
@pytest.mark.parametrize(
    "fn",
    [
        torch.floor_divide,
        torch.remainder,
        torch.fmod,
        lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    ],
)
def test_integer_division_by_a_constant(dtype, divisor, fn):
    if dtype is torch.uint8 and divisor < 0:
        pytest.skip("the divisor does not fit")
    x = torch.tensor([0, 1, 2, 3, 100, 127]).to(dtype)
    x = x if dtype is torch.uint8 else torch.cat([x, -x])
    assert_equals_eager(lambda x: fn(x, divisor), x)


@pytest.mark.parametrize("fn", [operator.floordiv, operator.mod, torch.fmod])
def test_integer_division_by_a_tensor_is_refused_since_torch_raises_on_zero(fn):
    gm, _ = capture(fn, torch.tensor([4, 5]), torch.tensor([2, 0]))
    reasons = []
    for node in gm.graph.nodes:
        lowering = registry.lookup(node.target)
        if lowering is not None and lowering.when is not None:
            reasons.append(lowering.when(node))
    assert any(reason and "divisor is zero" in reason for reason in reasons)


def test_integer_division_by_a_constant_zero_is_refused():
    gm, _ = capture(lambda x: torch.remainder(x, 1), torch.tensor([4, 5]))
    (node,) = [n for n in gm.graph.nodes if n.target is torch.ops.aten.remainder.Scalar]
    when = registry.lookup(node.target).when
    assert when(node) is None
    node.args = (node.args[0], 0)
    assert "divisor is zero" in when(node)


def test_integer_powers_wrap_and_have_negative_exponents():
    base = torch.tensor([3, -3, 2, 1, -1, -1, 7, 0, 2])
    exponent = torch.tensor([50, 41, 64, -5, -5, -4, -1, 0, 62])
    assert_equals_eager(torch.pow, base, exponent)
    assert_equals_eager(lambda x: x**13, base)
    assert_equals_eager(lambda x: 3**x, exponent.abs())


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64])
@pytest.mark.parametrize("fn", [torch.bitwise_left_shift, torch.bitwise_right_shift])
def test_shifts_by_the_width_and_more(dtype, fn):
    x = torch.tensor([1, 5, 127, 0]).to(dtype)
    x = x if dtype is torch.uint8 else torch.cat([x, -x])
    for amount in (0, 1, 7, 8, 63, 64):
        assert_equals_eager(lambda x, a=amount: fn(x, torch.full_like(x, a)), x)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (torch.tensor([1, 2]), 2.5),
        (torch.tensor([True, False]), 3),
        (torch.tensor([True, False]), torch.tensor([True, True])),
        (torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([-1, 300])),
        (torch.tensor([1.5], dtype=torch.bfloat16), torch.tensor(2.7182818, dtype=torch.float64)),
        (torch.tensor([1.5], dtype=torch.bfloat16), torch.tensor([2.7], dtype=torch.float16)),
        (torch.tensor([2**53 + 1]), torch.tensor([1], dtype=torch.int32)),
        (torch.tensor([1.0]), 1 + 2j),
    ],
)
@pytest.mark.parametrize("fn", [torch.add, torch.mul, torch.true_divide, torch.eq])
def test_promotion(fn, x, y):
    if isinstance(y, torch.Tensor):
        assert_equals_eager(fn, x, y)
    else:
        assert_equals_eager(lambda x: fn(x, y), x)


def test_bfloat16_is_computed_in_float32_and_rounded_once():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    for fn in (torch.exp, torch.tanh, lambda x: torch.lerp(x, -x, 0.3), torch.rsqrt):
        (result,) = run(fn, x.abs())
        exact = fn(x.abs().double()).bfloat16()
        assert (result != exact).double().mean() < 0.01


def test_comparison_rounds_a_number_to_the_tensors_dtype_as_eager_does():
    x = torch.tensor([0.1, 0.2], dtype=torch.bfloat16)
    assert_equals_eager(lambda x: x == 0.1, x)
    assert run(lambda x: x == 0.1, x)[0][0]


def test_nextafter_steps_in_the_operands_own_precision():
    x = torch.tensor([1.0, -2.0, 0.0], dtype=torch.bfloat16)
    assert_equals_eager(torch.nextafter, x, torch.full_like(x, INF))


def test_exp2_of_integers_is_exact():
    assert_equals_eager(torch.exp2, torch.arange(-126.0, 128.0))


def test_where_broadcasts_and_promotes():
    condition = torch.tensor([[True], [False]])
    x, y = torch.tensor([1, 2, 3]), torch.tensor(0.5)
    assert_equals_eager(torch.where, condition, x, y)


@pytest.mark.parametrize("decimals", [0, 2, -1])
def test_round_to_decimals(decimals):
    x = torch.tensor([0.125, 1.005, 15.0, 25.0, -2.675, INF, NAN])
    assert_equals_eager(lambda x: torch.round(x, decimals=decimals), x)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)])
def test_zero_size_and_scalars(shape):
    assert_equals_eager(lambda x: (x * 2 + 1).tanh(), torch.ones(shape), exact=False)


def test_frexp():
    x = torch.tensor([8.0, -0.3, 0.0, 1e30])
    for result, expected in zip(run(torch.frexp, x), torch.frexp(x), strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_complex_parts_and_construction():
    x = torch.tensor([1 + 2j, -3.5j, 0j])
    for fn in (torch.conj_physical, torch.real, torch.imag, torch.angle, torch.abs, torch.sgn):
        assert_equals_eager(fn, x, exact=False)
    assert_equals_eager(torch.view_as_real, x)
    assert_equals_eager(
        torch.polar, torch.tensor([1.0, 2.0]), torch.tensor([0.3, -2.0]), exact=False
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x + 0,
        lambda x: 0.0 + x,
        lambda x: x + -0.0,
        lambda x: torch.add(x, 1, alpha=0),
        lambda x: torch.add(x, 0, alpha=-1),
        lambda x: x - 0,
        lambda x: 0 - x,
        lambda x: x * 1,
        lambda x: (x + 0).copysign(torch.ones_like(x)) * torch.copysign(torch.ones_like(x), x + 0),
    ],
)
def test_zeros_have_the_sign_that_eager_gives_them(fn, dtype):
    assert_equals_eager(fn, SPECIAL.to(dtype))


def units_in_the_last_place(result, precise):
    _, exponent = torch.frexp(precise.abs().clamp(min=torch.finfo(torch.float32).tiny))
    return (result.double() - precise).abs() / torch.exp2(exponent.double() - 24)


@pytest.mark.parametrize(
    "fn",
    [torch.expm1, torch.sinh, torch.cosh, torch.tanh, F.elu, F.selu, F.celu, torch.asin],
)
def test_float32_functions_are_as_accurate_as_float32_is(fn):
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(20_000, generator=generator)
    x = torch.cat([normal * scale for scale in (1e-20, 1e-3, 0.3, 1.0, 20.0)]).clamp(-88, 88)
    (result,), precise = run(fn, x), fn(x.double())
    assert torch.equal(result.isnan(), precise.isnan())
    error = units_in_the_last_place(result, precise).nan_to_num(0.0)
    assert error.max() < 3, x[error.argmax()]


@pytest.mark.parametrize("size", [1, 2, 5, 8, 13, 64])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: x.log(),
        lambda x, y: x.log2(),
        lambda x, y: x.log10(),
        lambda x, y: x**0.3,
        lambda x, y: y**x,
        lambda x, y: y**-x,
        lambda x, y: 1.5**x,
        lambda x, y: torch.atan2(x, x),
        lambda x, y: torch.atan2(x, -x),
    ],
)
def test_denormal_numbers_are_zeros(fn, size):
    x, zeros = torch.full((size,), 1e-40), torch.zeros(size)
    for sign in (1, -1):
        (result,) = run(fn, sign * x, zeros)
        torch.testing.assert_close(result, fn(sign * zeros, zeros), equal_nan=True)


def test_hardswish_overflows_where_eager_does():
    assert_equals_eager(
        F.hardswish, torch.tensor([1e37, 5e37, 6e37, 1e38, 3e38, -3e38] * 3), exact=False
    )

"""What IREE is trusted with: the reasons for a refusal, and that refusals are few."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dynamo_backends
from dynamo_backends import CompileError, FallbackRefusedError
from dynamo_backends.iree import legalize, trial
from dynamo_backends.iree.compiler import (
    CompilerCrashError,
    Settings,
    compile_program,
    plain_message,
)
from dynamo_backends.runtime.verdicts import VerdictStore

aten = torch.ops.aten


def refusals(fn: Callable[..., Any], *inputs: Tensor) -> str:
    """The reasons for what runs in eager, in one text."""
    function = torch.compile(fn, backend=dynamo_backends.compiler("iree", min_block_size=1))
    with torch.no_grad(), dynamo_backends.record() as reports:
        torch.testing.assert_close(function(*inputs), fn(*inputs), equal_nan=True)
    assert not any(r.runtime_fallbacks for r in reports)
    return "; ".join(f"{f.op}: {f.reason}" for r in reports for f in r.fallbacks)


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_verdicts", VerdictStore("iree", (), shipped=False))


def test_every_refusal_has_its_reason():
    def fn(x: Tensor, n: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return x.double().sinh(), n // n.flip(0), n << 1, torch.linalg.cholesky(x), x * mask

    x = torch.eye(4) * 3
    n, sparse = torch.tensor([7, -7, 3, 2]), torch.ones(4, dtype=torch.complex128)
    said = refusals(fn, x, n, sparse)
    assert "aten.sinh.default: it is computed from exponentials" in said
    assert "an integer division by zero would crash the process" in said
    assert "aten.linalg_cholesky_ex.default: IREE" in said


@pytest.mark.parametrize("choose", [torch.maximum, torch.minimum])
def test_nan_is_kept_by_maxima_of_single_numbers(choose: Callable[..., Tensor]):
    x = torch.tensor([1.0, float("nan"), 2.0])
    assert not refusals(lambda x: x / choose(x.sum(-1, True), torch.full([], 1e-12)), x)


def test_functions_have_their_digits_for_small_and_large_numbers():
    x = torch.tensor([1e-7, -1e-7, 0.5, -0.3, 3.0, -20.0, 88.9, -88.5, 1e20, float("nan")])

    def functions(x: Tensor) -> tuple[Tensor, ...]:
        odd = x.sinh(), x.asinh(), x.atanh(), x.tan()
        return *odd, x.cosh(), x.acosh(), x.erfc(), functional.silu(x), functional.elu(x)

    functional = torch.nn.functional
    compiled = torch.compile(
        functions, backend=dynamo_backends.compiler("iree", verify="off", fallback="error")
    )
    with torch.no_grad():
        pairs = list(zip(compiled(x), functions(x), strict=True))
    for found, right in pairs:
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-38, equal_nan=True)


def test_a_product_before_softmax_is_rounded_once():
    x = torch.tensor([[0.0, 10.4, 1e20], [2147483648.0, 100.0, 1.0]])

    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 0.1
        return y.softmax(0), y.log_softmax(0), y.logsumexp(0), y / y.norm(dim=0)

    assert refusals(function, x) == ""


def test_positions_of_extrema_are_those_of_nan_and_integers_are_negated_whole():
    nan = float("nan")
    assert refusals(lambda x: (x.argmax(-1), x.argmin(0)), torch.tensor([[1, nan, 2.0, nan]])) == ""
    x = torch.tensor([-(2**31) - 5, 2**53 + 1, 7, 0])
    assert refusals(lambda x: (-x, x.abs(), torch.fmod(x, 3)), x) == ""


def test_sines_of_numbers_of_any_size_have_all_digits():
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** torch.linspace(-40, 38, 40)
    x = (torch.rand(100, 40, generator=generator) * sizes).flatten()
    x = torch.cat([x, -x, torch.tensor([0.0, -0.0, math.pi, 1e30, float("inf"), float("nan")])])

    def functions(x: Tensor) -> tuple[Tensor, ...]:
        return x.sin(), x.cos(), x.tan()

    with torch.no_grad():
        found = _whole(functions)(x)
        for ours, right in zip(found, functions(x.double()), strict=True):
            right = right.float()
            torch.testing.assert_close(ours, right, rtol=5e-7, atol=1.2e-38, equal_nan=True)
            assert (ours.signbit() == right.signbit())[right == 0].all()


def _whole(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled whole, or an error."""
    backend = dynamo_backends.compiler("iree", verify="off", fallback="error", min_block_size=1)
    return torch.compile(fn, backend=backend, fullgraph=True, dynamic=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_that_round_are_computed(dtype: torch.dtype):
    x = torch.tensor([65520.0, 1.0001, 3.14159, -70000.0, 1e-3, -0.0, float("nan"), 3.3961776e38])
    for fn in (
        lambda x: x.to(dtype).float(),
        lambda x: x.to(dtype).float().abs() + 1,
        lambda x: x.reshape(2, 4).triu().to(dtype).float(),
        lambda x: x.double().to(dtype).float() * 2,
        lambda x: (x.nan_to_num(0) * 1e-30).int().to(dtype).float() + 0.5,
    ):
        with torch.no_grad():
            torch.testing.assert_close(_whole(fn)(x), fn(x), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64])
def test_integers_are_those_of_eager(dtype: torch.dtype):
    info = torch.iinfo(dtype)
    x = torch.tensor([info.min, info.min + 1, 0, 1, 7, 100, info.max - 1, info.max], dtype=dtype)

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        rests = x % 3, torch.fmod(x, 7), x // 100, torch.div(x, 3, rounding_mode="trunc")
        ordered = x.sort(descending=True)[0], x.topk(3)[0], x.sort()[1]
        narrow = x.to(torch.int8), x.to(torch.uint8).int(), x.to(torch.int8).to(torch.uint8)
        return -x, x.abs(), torch.where(x > 3, x, 0), *rests, *ordered, *narrow

    with torch.no_grad():
        for ours, right in zip(_whole(fn)(x), fn(x), strict=True):
            assert ours.dtype == right.dtype
            assert torch.equal(ours, right), (ours, right)


def test_functions_of_two_numbers_know_all_pairs_of_special_ones():
    inf, nan = float("inf"), float("nan")
    values = [0.0, -0.0, 1, -1, 2, -3, 0.5, -2.5, 1e20, -1e30, 1e-20, inf, -inf, nan, 16777217]
    pairs = torch.cartesian_prod(torch.tensor(values), torch.tensor(values))
    x, y = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x.atan2(y), x.hypot(y), x.copysign(y), x.pow(y), x.fmod(y.abs() + 1), x.signbit()

    with torch.no_grad():
        for ours, right in zip(_whole(fn)(x, y), fn(x, y), strict=True):
            torch.testing.assert_close(ours, right, rtol=2e-6, atol=1.2e-38, equal_nan=True)


def test_numbers_are_sorted_with_nan_last_and_sums_of_exponentials_do_not_overflow():
    x = torch.tensor([[1.0, float("nan"), -float("inf"), 0.0], [100, -0.5, float("inf"), 90]])

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        values, places = x.sort(1, descending=True)
        sums = torch.tensor([[88.0, 89, -100]]).logcumsumexp(1)
        return values, places, x.sort(0)[0], x.topk(2)[0], x.clamp(-1, 1).erfinv(), sums + x[:1, :1]

    with torch.no_grad():
        for ours, right in zip(_whole(fn)(x), fn(x), strict=True):
            torch.testing.assert_close(ours, right, rtol=2e-6, atol=1e-38, equal_nan=True)


def test_numbers_that_are_compared_with_are_rounded_first():
    x = torch.tensor([1e-20, 0.1, 0.3, float("nan"), 2.0])

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return x == 1e-20, x != 0.1, x >= 0.3, x <= 0.1, x > 0.1, x < 0.3

    with torch.no_grad():
        assert all(map(torch.equal, _whole(fn)(x), fn(x)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
def test_inputs_keep_their_contents(dtype: torch.dtype):
    x, y = (torch.arange(12).flip(0).reshape(3, 4).to(dtype) * k for k in (1, 5))
    places = torch.tensor([[0, 2, 1, 0], [1, 1, 0, 2], [2, 0, 0, 1]])

    def fn(x: Tensor, y: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        scattered = x.scatter(-1, i, 2), x.scatter(0, i, y), y.scatter_add(-1, i, x)
        rows = x.index_put((i[0, :2],), y[:2]), x.index_add(0, i[0, :2], y[:2])
        return *scattered, *rows, x.sort(-1)[0], y.topk(2)[0], x.reshape(4, 3).sort(0)[0]

    before = x.clone(), y.clone(), places.clone()
    with torch.no_grad():
        found = _whole(fn)(x, y, places)
        assert all(map(torch.equal, before, (x, y, places)))
        assert all(map(torch.equal, found, fn(x, y, places)))


@pytest.mark.long
def test_what_networks_are_made_of_is_taken():
    functional = torch.nn.functional

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return (
            functional.gelu(x) + functional.gelu(x, approximate="tanh"),
            functional.elu(x, 0.5) + functional.hardtanh(x) + functional.hardswish(x),
            functional.layer_norm(x, (8,)),
            functional.scaled_dot_product_attention(x, x, x),
            x.var(-1) + x.std(-1, correction=0),
            (x > 0).sum(-1, dtype=torch.float32) * torch.ones(1, dtype=torch.bfloat16),
            x.sin() + x.cos(),
            (x == x.flip(0)) | x.isfinite(),
            functional.interpolate(x, size=6, mode="nearest-exact"),
        )

    assert refusals(fn, torch.randn(2, 4, 8, 8)) == ""


def test_products_with_expanded_matrices_are_taken(nothing_known: None):
    expanded = torch.randn(1, 8).expand(8, 8)
    assert refusals(lambda x, y: (x @ y).relu() + 1, torch.randn(4, 8), expanded) == ""


def test_calls_are_tried_together_and_one_that_fails_spoils_no_other(
    monkeypatch: pytest.MonkeyPatch, nothing_known: None
):
    sizes: list[int] = []
    original = trial._try_together

    def count(trials: Any, settings: Settings, found: trial.Found) -> None:
        sizes.append(len(trials))
        original(trials, settings, found)

    def refuse(module: bytes, settings: Settings) -> bytes:
        if b"aten.neg" in module:
            raise CompileError("no negation today")
        return compile_program(module, settings)

    monkeypatch.setattr(trial, "_try_together", count)
    monkeypatch.setattr(trial, "compile_program", refuse)
    monkeypatch.setattr(trial, "has_decomposition", lambda op: False)
    said = refusals(lambda x: (x.exp(), x.tanh(), x.neg(), x.abs()), torch.randn(3))
    assert said == "aten.neg.default: no negation today"
    assert sizes == [4, 2, 2, 1, 1]
    assert refusals(lambda x: (x.exp().abs(), x.tanh()), torch.randn(9)) == ""
    assert len(sizes) == 5, "verdicts are kept, whatever the sizes are"


def test_a_wrong_lowering_is_noticed(monkeypatch: pytest.MonkeyPatch, nothing_known: None):
    monkeypatch.setitem(legalize._SPELLINGS, aten.cos.default, torch.sin)
    monkeypatch.setattr(trial, "has_decomposition", lambda op: False)
    said = refusals(lambda x: x.cos(), torch.randn(30))
    assert "aten.cos.default: in a trial IREE's output 0 " in said


def test_what_is_spelled_differently_is_exact():
    functions = [torch.nn.functional.gelu, torch.sin, torch.cos, lambda x: torch.log10(x.abs())]

    def fn(x: Tensor) -> list[Tensor]:
        return [function(x) for function in functions]

    x = torch.cat([torch.linspace(-7, 7, 300), torch.tensor([1e-7, 1e-3, -1e4, 1e4, 7.3e3])])
    results = torch.compile(fn, backend=dynamo_backends.compiler("iree"))(x)
    for result, precise in zip(results, fn(x.double()), strict=True):
        error = (result - precise).abs() / (precise.abs() + 1e-2)
        assert error.nan_to_num(0).max() < 5e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_spelled_differently_keeps_the_sign_of_zero(dtype: torch.dtype):
    x = torch.tensor([-0.0, 0.0, 0.01, -0.01], dtype=dtype)
    said = refusals(lambda x: (1 / x.sin(), 1 / x.erf(), 1 / x.trunc(), 1 / x.frac()), x)
    assert dtype == torch.float64 or said == ""


def test_a_refused_operator_is_an_error_if_nothing_may_fall_back():
    def fn(x: Tensor) -> Tensor:
        return torch.sinh(x.double().sigmoid()).tanh()

    with pytest.raises(Exception, match="sinh") as info:
        torch.compile(fn, backend="iree", options={"fallback": "error"})(torch.rand(4))
    assert isinstance(getattr(info.value, "inner_exception", info.value), FallbackRefusedError)


def test_the_compiler_is_stopped_and_its_messages_are_told():
    with pytest.raises(CompileError, match=r"did not finish within 0\.001 s"):
        compile_program(b"", Settings(seconds=0.001))
    with pytest.raises(CompileError, match="IREE's compiler rejects it: "):
        compile_program(b"nothing", Settings())
    text = "<stdin>:1:2: error: failed to legalize operation 'torch.aten.foo' that was explicitly"
    assert plain_message(text) == "it has no lowering of aten.foo"
    assert plain_message(text.replace("aten.foo", "operator")) == "it has no lowering of it"


def test_a_broken_compiler_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    program = tmp_path / "iree-compile"
    program.write_text("#!/bin/sh\nkill -SEGV $$\n")
    program.chmod(0o755)
    monkeypatch.setattr("dynamo_backends.iree.compiler.compiler_path", lambda: str(program))
    with pytest.raises(CompileError, match=r"crashed \(signal 11\)"):
        compile_program(b"", Settings())


def test_what_the_compiler_breaks_down_at_is_left_out(monkeypatch: pytest.MonkeyPatch):
    """Only together, so that trials do not show it; here it is planted."""
    compiled = []

    def breaks(module: bytes, settings: Settings) -> bytes:
        compiled.append(module)
        if b"aten.tanh" in module and b"aten.log1p" in module:
            raise CompilerCrashError("IREE's compiler crashed (signal 11)")
        return compile_program(module, settings)

    monkeypatch.setattr("dynamo_backends.iree.compiler.compile_program", breaks)
    monkeypatch.setattr(dynamo_backends.get_backend("iree"), "_culprits", set())

    def fn(x: Tensor) -> Tensor:
        y = x.exp().tanh().abs()
        return (y.log1p() * 2 + 1).sqrt()

    said = refusals(fn, torch.randn(4, 5))
    assert said.startswith("aten.log1p.default: IREE's compiler crashed (signal 11) when")
    assert said.count(";") == 0
    assert len(compiled) <= 1 + 3 + 2  # the graph, its beginnings, and two blocks

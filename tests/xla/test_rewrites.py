"""Pairs of calls that XLA's algebraic simplifier would rewrite are computed as they are written."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends.xla import _jaxlib
from dynamo_backends.xla.lowering import interpreter
from tests.aot.step_checks import assert_one_program

inf, nan = float("inf"), float("nan")

# fmt: off
VALUES = torch.tensor([
    0.0, -0.0, 1.0, -1.0, 10.4, -10.4, 0.5, 2.5, 18.5, -18.5, 85.0, -85.0, 89.0, 100.0, 120.0,
    1000.0, 65520.0, 70000.0, 16777217.0, 1e15, -1e15, 1e20, -1e20, 1e30, -1e30, 3e38, 1e-15,
    1e-18, inf, -inf, nan,
])
# fmt: on
"""Without those whose results are denormal numbers, which XLA flushes to zero."""

PAIRS: dict[str, Callable[[Tensor], Tensor]] = {
    "add, sub": lambda x: (x + 12582912.0) - 12582912.0,
    "sub, add": lambda x: (x - 3.3e7) + 3.3e7,
    "add, add": lambda x: x + 1e30 + (-1e30),
    "add, sub of x": lambda x: (x + 1) - x,
    "mul, mul": lambda x: x * 1e30 * 1e30,
    "mul, div": lambda x: x * 1e30 / 1e30,
    "div, div": lambda x: torch.where(x.abs() > 1e10, x, 1e10) / 1e20 / 1e20,
    "sub of itself": lambda x: x - x,
    "div by itself": lambda x: x / x,
    "mul by 0": lambda x: x * 0,
    "distribution": lambda x: x * 1e20 + x * -1e20,
    "exp, log": lambda x: torch.log(torch.exp(x.clamp(-85))),
    "log, exp": lambda x: torch.exp(torch.log(x)),
    "exp, mul": lambda x: torch.exp(x.clamp(-40, 80)) * torch.exp(x.clamp(-40, 80)),
    "exp, div": lambda x: torch.exp(x.clamp(-85)) / torch.exp(x.clamp(-85)),
    "mul, sqrt": lambda x: torch.sqrt(x * x),
    "pow, sqrt": lambda x: (x**2) ** 0.5,
    "sqrt, mul": lambda x: torch.sqrt(x) * torch.sqrt(x),
    "mul, log": lambda x: torch.log(x * x),
    "reciprocal twice": lambda x: 1 / (1 / x.clamp(-1e30, 1e30)),
    "float16": lambda x: x.half().float(),
    "bfloat16": lambda x: x.bfloat16().float(),
    "float16 and back, then a product": lambda x: (x.half() * 2).float(),
    "float64": lambda x: (x.double() * 1e300 * 1e300).float(),
    "sigmoid, log": lambda x: torch.log(torch.sigmoid(x.clamp(-85))),
    "comparison of a sum": lambda x: (x + 1e20 > 1e20).float(),
    "where x is x": lambda x: torch.where(x == x, x, torch.zeros_like(x)),
    "maximum, minimum": lambda x: x.clamp_min(3).clamp_max(1),
    "int32": lambda x: x[:16].int() * 65536 * 65536,
    "int32, floor_divide": lambda x: x[:16].int() * 2**30 // 2**30,
    "int32, shifts": lambda x: x[:16].int() << 28 >> 28,
}  # fmt: skip


def every_pair(x: Tensor) -> list[Tensor]:
    return [pair(x) for pair in PAIRS.values()]


def wrong_pairs(results: list[Tensor], x: Tensor) -> list[str]:
    found = []
    for name, ours, theirs in zip(PAIRS, results, every_pair(x), strict=True):
        if not torch.allclose(ours, theirs, 1e-4, 0, equal_nan=True):
            found.append(name)
    return found


def test_pairs_are_computed_as_written() -> None:
    compiler = dynamo_backends.compiler("openxla", fallback="error", verify="off")
    assert wrong_pairs(torch.compile(every_pair, backend=compiler)(VALUES), VALUES) == []


@pytest.fixture
def simplifier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs for CPUs are compiled with the pass, as those for other platforms are."""
    monkeypatch.setattr(_jaxlib, "CPU_DISABLED_PASSES", ())


@pytest.fixture
def no_barriers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "find_barrier_nodes", lambda graph: frozenset())


@pytest.mark.usefixtures("simplifier")
def test_barriers_protect_pairs_from_the_simplifier() -> None:
    compiler = dynamo_backends.compiler("openxla", fallback="error", verify="off", cache=False)
    assert wrong_pairs(torch.compile(every_pair, backend=compiler)(VALUES), VALUES) == []


@pytest.mark.usefixtures("simplifier", "no_barriers")
def test_without_barriers_the_simplifier_rewrites_some_of_them() -> None:
    """And verification reports the call, whatever rounding does to it."""
    compiler = dynamo_backends.compiler("openxla", fallback="error", verify="off", cache=False)
    wrong = wrong_pairs(torch.compile(every_pair, backend=compiler)(VALUES), VALUES)
    assert {"add, sub", "mul, sqrt", "mul, mul"} <= set(wrong)
    torch.compiler.reset()
    compiler = dynamo_backends.compiler("openxla", fallback="error", cache=False)
    compiled = torch.compile(PAIRS["add, sub"], backend=compiler)
    with pytest.raises(dynamo_backends.VerificationError, match="differs from eager"):
        compiled(VALUES[:8])


def test_pairs_at_sizes_that_vary() -> None:
    options = {"fallback": "error", "verify": "off", "exact_after": 1000}
    compiler = dynamo_backends.compiler("openxla", **options)
    compiled = torch.compile(every_pair, backend=compiler, dynamic=True)
    for count in (31, 27):
        assert wrong_pairs(compiled(VALUES[:count]), VALUES[:count]) == []


def test_pairs_in_a_step() -> None:
    """What a parameter becomes is what the pair leaves of it."""

    class Rounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([10.4, 3.3]))

    model = Rounded()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step(x: Tensor) -> Tensor:
        loss = (model.weight * ((x + 12582912.0) - 12582912.0)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = dynamo_backends.compile_step(
        step, model=model, optimizer=optimizer, backend="openxla"
    )
    for weights in ((10.4, 3.3), (0.4, 0.3), (-9.6, -2.7)):
        torch.testing.assert_close(model.weight.detach(), torch.tensor(weights))
        loss = compiled(torch.tensor([10.4, 3.3]))
        torch.testing.assert_close(loss, torch.tensor(weights[0] * 10 + weights[1] * 3))
    assert_one_program(compiled, 3)


@pytest.mark.parametrize("more", [(), ("cpu-all-reduce-combiner",)])
def test_further_passes_are_disabled_beside_the_simplifier(more: tuple[str, ...]) -> None:
    with mock.patch.object(_jaxlib, "CPU_DISABLED_PASSES", ("algsimp",)):
        ((name, passes),) = _jaxlib._disabled_passes("cpu", more)
    assert (name, passes.split(",")) == ("xla_disable_hlo_passes", ["algsimp", *more])
    assert _jaxlib._disabled_passes("cuda") == []

"""Casts round: chains of casts through all floating-point types, alone and in larger graphs."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import dynamo_backends
from dynamo_backends import compile_step
from tests.backend_checks import usable

BACKENDS = ("openxla", "onnxrt", "ov", "tvm", "inductor_freezing")

VALUES = (
    0.0, -0.0, 1.0, 10.4, 0.1, 1 / 3, 2049.0, 4097.0, 65504.0, 65519.0, 65520.0, -65520.0, 70000.0,
    1.0009765, 257.0, 16777217.0, 3e38, 3.39e38, -3.4e38, 1e-3, float("inf"), -float("inf"),
)  # fmt: skip
"""Numbers that fit, round, tie and overflow, in each of the types."""

TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

BEFORE: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda x: x,
    "neg": lambda x: -x,
    "cat": lambda x: torch.cat([x, x]),
    "product": lambda x: x.float() * 1.5,
}
AFTER: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda x: x,
    "sum": lambda x: x.float() + 1.0,
    "product": lambda x: x.float() * 2.0,
}


@dataclass(frozen=True)
class Chain:
    """Casts one after the other, and what is computed before and after them."""

    source: torch.dtype
    types: tuple[torch.dtype, ...]
    before: str
    after: str

    def __call__(self, x: Tensor) -> Tensor:
        x = BEFORE[self.before](x)
        for dtype in self.types:
            x = x.to(dtype)
        return AFTER[self.after](x)


def draw(rng: random.Random) -> Chain:
    types = tuple(rng.choice(TYPES) for _ in range(rng.randint(1, 4)))
    return Chain(rng.choice(TYPES), types, rng.choice([*BEFORE]), rng.choice([*AFTER]))


def wrong_chains(backend: str, chains: Sequence[Chain]) -> list[Chain]:
    inputs = [torch.tensor(VALUES, dtype=torch.float64).to(c.source) for c in chains]

    def graph(xs: Sequence[Tensor]) -> list[Tensor]:
        return [chain(x) for chain, x in zip(chains, xs, strict=True)]

    compiler = dynamo_backends.compiler(backend, verify="off")
    results = torch.compile(graph, backend=compiler)(inputs)
    pairs = zip(chains, graph(inputs), results, strict=True)
    return [chain for chain, theirs, ours in pairs if not torch.equal(ours, theirs)]


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(2))
def test_chains_of_casts_round(backend: str, seed: int) -> None:
    rng = random.Random(seed)
    chains = [draw(rng) for _ in range(16)]
    assert wrong_chains(usable(backend), chains) == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_cast_there_and_back_is_computed(backend: str, dtype: torch.dtype) -> None:
    chain = Chain(torch.float32, (dtype, torch.float32), "nothing", "nothing")
    assert wrong_chains(usable(backend), [chain]) == []
    larger = Chain(torch.float32, (dtype, torch.float32), "product", "sum")
    assert wrong_chains(backend, [larger]) == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("before", ["nothing", "neg", "cat"])
@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16], ids=str)
def test_a_cast_between_types_of_16_bits_is_computed(
    backend: str, source: torch.dtype, before: str
) -> None:
    other = torch.bfloat16 if source == torch.float16 else torch.float16
    chains = [Chain(source, (other, torch.float32), before, after) for after in AFTER]
    assert wrong_chains(usable(backend), chains) == []


ARITHMETIC: dict[str, Callable[[Tensor], Tensor]] = {
    "product": lambda x: x * 1.5,
    "quotient": lambda x: x * 1000 / 1000,
    "difference": lambda x: (x + 2048) - 2048,
    "square": lambda x: (x * x).sqrt(),
    "mean": lambda x: x + x.mean(),
    "matrix": lambda x: (x[:4, None] * x[None, :4]) @ x[4:8],
}


@pytest.mark.parametrize("backend", ["onnxrt"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_of_16_bits_rounds(backend: str, dtype: torch.dtype, name: str) -> None:
    """Each result is a number of the type, and those beyond it are infinite."""
    x = torch.tensor([0.2, 70000.0, -1000.0, 1e-6, 300.0, 1e-3, 2.5, 65504.0, 1.1])
    function = lambda x: ARITHMETIC[name](x.to(dtype)).float()  # noqa: E731
    with torch.no_grad():
        compiler = dynamo_backends.compiler(usable(backend), verify="off", min_block_size=1)
        result, expected = torch.compile(function, backend=compiler)(x), function(x)
    assert torch.equal(result.to(dtype).float().nan_to_num(1.0), result.nan_to_num(1.0))
    torch.testing.assert_close(
        result, expected, rtol=torch.finfo(dtype).eps, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("backend", ["openxla", "ov", "inductor_freezing"])
def test_casts_of_weights_round(backend: str) -> None:
    """They are folded into the program."""
    layer = torch.nn.Linear(64, 64).requires_grad_(False)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return (x.relu() + 1) @ layer.weight.float(), layer.weight.bfloat16().t()

    x = torch.randn(8, 64)
    with torch.no_grad():
        compiled = torch.compile(function, backend=dynamo_backends.compiler(usable(backend)))
        assert torch.equal(compiled(x)[1], layer.weight.bfloat16().t())


class Shift(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = torch.nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.by) * 1.5


@pytest.mark.parametrize("backend", ["openxla", "inductor", "onnxrt"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_casts_in_a_step_round(backend: str, dtype: torch.dtype) -> None:
    if backend != "inductor":
        usable(backend)

    def step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
        def step(x: Tensor) -> Tensor:
            y = model(x).to(dtype).float()
            y[:3].sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            return y.detach()

        return step

    eager, ours = Shift(), Shift()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, ours)]
    compiled = compile_step(
        step_of(ours, optimizers[1]),
        model=ours,
        optimizer=optimizers[1],
        backend=backend,
    )
    x, step = torch.tensor(VALUES), step_of(eager, optimizers[0])
    for launches in (0, 1, 2):  # a program with a wrong result is not launched again
        assert torch.equal(compiled(x), step(x))
        assert compiled.launches == launches

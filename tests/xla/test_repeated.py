"""Products of a batch with what is the same for all of it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax
from torch import nn

import dynamo_backends
from dynamo_backends.xla import _jaxlib, prologue
from dynamo_backends.xla.matmul_rewrites import simplify_products
from dynamo_backends.xla.repeated_operands import may_fuse_products
from dynamo_backends.xla.runtime import open_device

BATCH = (2, 3)


def array(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def along_batch(y: jax.Array, batch: tuple[int, ...] = BATCH) -> jax.Array:
    return lax.broadcast_in_dim(
        y, (*batch, *y.shape), tuple(range(len(batch), len(batch) + y.ndim))
    )


def by(x: jax.Array, y: jax.Array) -> list[jax.Array]:
    """x @ y.T for each of a batch."""
    rank = x.ndim
    dims = tuple(range(rank - 2))
    return [lax.dot_general(x, y, (((rank - 1,), (rank - 1,)), (dims, dims)))]


def repeat(y: jax.Array, *places: int) -> jax.Array:
    """Its dimensions at these places of four."""
    return lax.broadcast_in_dim(y, (2, 3, 6, 5), places)


X, Y, ROWS = array(2, 3, 4, 5), array(6, 5), array(6, 7, 5)
FLAT, SWAPPED, ALONE = X.reshape(6, 4, 5), X.transpose(1, 0, 2, 3), X[0, :1]
Operands = tuple[np.ndarray, np.ndarray]
REPEATED: dict[str, tuple[Callable[..., Any], Operands]] = {
    "as it is": (lambda x, y: by(x, along_batch(y)), (X, Y)),
    "of a sum": (lambda x, y: by(x, along_batch(y.sum(1))), (X, ROWS)),
    "of a maximum": (
        lambda x, y: by(x, along_batch(lax.reduce(y, np.float32(-9), lax.max, (1,)))),
        (X, ROWS),
    ),
    "with numbers": (lambda x, y: by(x, jnp.tanh(along_batch(y)) * 2 + 1), (X, Y)),
    "merged": (lambda x, y: by(x, lax.reshape(along_batch(y), (6, 6, 5))), (FLAT, Y)),
    "split": (lambda x, y: by(x, lax.reshape(along_batch(y, (6,)), (2, 3, 6, 5))), (X, Y)),
    "summed later": (lambda x, y: by(x, along_batch(y).sum(3)), (X, ROWS)),
    "transposed": (
        lambda x, y: by(x, lax.transpose(along_batch(y.T), (1, 0, 3, 2))),
        (SWAPPED, Y),
    ),
    "from one": (lambda x, y: by(x, repeat(y, 0, 1, 2, 3)), (X, Y[None, None])),
}
VARYING: dict[str, tuple[Callable[..., Any], Operands]] = {
    "along a part of the batch": (lambda x, y: by(x, repeat(y, 1, 2, 3)), (X, array(3, 6, 5))),
    "plus others": (lambda x, y: by(x, along_batch(y) + x[:, :, :1]), (X, Y)),
    "the first operand": (lambda x, y: by(along_batch(y), x), (X, Y)),
    "its rows are the same": (lambda x, y: by(x, repeat(y, 0, 1, 3)), (X, array(2, 3, 5))),
    "a batch of one": (lambda x, y: by(x, along_batch(y, (1,))), (ALONE, Y)),
}


@pytest.mark.parametrize("name", [*REPEATED, *VARYING])
def test_read_once(name: str):
    """The product has no batch any more where that is so of its second operand."""
    function, operands = (REPEATED | VARYING)[name]
    program = jax.make_jaxpr(function)(*operands)
    simpler = simplify_products(program)
    (result,) = prologue.as_function(simpler)(*operands)
    np.testing.assert_allclose(result, function(*operands)[0], rtol=1e-5, atol=1e-5)
    assert batches(program) == [True]
    assert batches(simpler) == [name in VARYING]


def batches(program: Any) -> list[bool]:
    """Of each product whether it has batch dimensions."""
    dots = [e for e in program.jaxpr.eqns if e.primitive.name == "dot_general"]
    return [bool(e.params["dimension_numbers"][1][0]) for e in dots]


def test_products_by_themselves_where_an_operand_is_repeated():
    """Also in a loop, and in a branch."""

    def product(y: jax.Array, x: jax.Array = X[0, 0]) -> jax.Array:
        return lax.dot_general(x, lax.broadcast_in_dim(y, (5, 6), (0,)), (((1,), (0,)), ((), ())))

    def plain(y: jax.Array) -> jax.Array:
        return lax.dot_general(X[0, 0], y, (((1,), (0,)), ((), ())))

    y, full = array(5), array(5, 6)
    repeating: list[Callable[..., Any]] = [
        product,
        lambda y: lax.fori_loop(0, 3, lambda i, z: z + product(y), jnp.zeros((4, 6))),
        lambda y: lax.cond(y[0] > 0, product, lambda y: jnp.zeros((4, 6)), y),
    ]
    for function in repeating:
        assert not may_fuse_products(jax.make_jaxpr(function)(y))
    assert may_fuse_products(jax.make_jaxpr(plain)(full))
    looped = lambda y: lax.fori_loop(0, 3, lambda i, z: z + plain(y), jnp.zeros((4, 6)))  # noqa: E731
    assert may_fuse_products(jax.make_jaxpr(looped)(full))


def test_batch_dimensions_anywhere():
    x, y = array(5, 2, 4, 3), array(5, 6)
    dims = ((0,), (1,)), ((3, 1), (0, 2))

    def function(x: jax.Array, y: jax.Array) -> list[jax.Array]:
        return [lax.dot_general(x, lax.broadcast_in_dim(y, (3, 5, 2, 6), (1, 3)), dims)]

    simpler = simplify_products(jax.make_jaxpr(function)(x, y))
    (result,) = prologue.as_function(simpler)(x, y)
    assert batches(simpler) == [False]
    np.testing.assert_allclose(result, np.einsum("abcd,ae->dbce", x, y), rtol=1e-5, atol=1e-5)


class Prototypes(nn.Module):
    """Compares each of a batch with means, as few-shot classifiers do."""

    def forward(self, x: torch.Tensor, examples: torch.Tensor) -> torch.Tensor:
        means = torch.relu(examples.mean(1)).expand(x.shape[0], -1, -1)
        return torch.bmm(x, means.transpose(1, 2))


class Pooled(nn.Module):
    """The head of convolutional networks; its matrix is large, its rows are few."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(512, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(x).mean((2, 3)))


@pytest.mark.parametrize(
    ("model", "shapes"),
    [(Prototypes(), [(2, 500, 640), (4, 49, 640)]), (Pooled(), [(4, 512, 7, 7)])],
    ids=["prototypes", "pooled"],
)
def test_reductions_before_products_are_right(model: nn.Module, shapes: list[tuple[int, ...]]):
    """XLA's CPU client fused both into what computed NaN, or crashed."""
    inputs = [torch.from_numpy(array(*shape)) for shape in shapes]
    options = {"cache": False, "verify": False, "fallback": "error"}
    compiled = torch.compile(model, backend=dynamo_backends.compiler("openxla", **options))
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fuses", [True, False])
def test_a_version_of_xla_without_the_flag_compiles_without_it(fuses: bool):
    class Client:
        """Knows no experimental flags."""

        def __init__(self) -> None:
            self.asked: list[list[str]] = []

        def compile_and_load(self, module: bytes, devices: Any, options: Any) -> str:
            names = [name for name, _ in options.env_option_overrides]
            self.asked.append(names)
            unknown = [name for name in names if "experimental" in name]
            if unknown:
                raise jax.errors.JaxRuntimeError(
                    f"INVALID_ARGUMENT: No such compile option: '{unknown[0]}'"
                )
            return "compiled"

    client, device = Client(), open_device("cpu").handle
    how = {"sparing": True, "fuses_products": fuses}
    assert _jaxlib.compile_program(client, device, b"", **how) == "compiled"
    others = {"xla_cpu_scheduler_type", "xla_disable_hlo_passes", "xla_allow_excess_precision"}
    assert set(client.asked[-1]) == others
    assert len(client.asked) == (1 if fuses else 2)


def test_another_error_of_xla_is_raised():
    class Client:
        def compile_and_load(self, *_: Any) -> None:
            raise jax.errors.JaxRuntimeError("INTERNAL: planted")

    with pytest.raises(jax.errors.JaxRuntimeError, match="planted"):
        _jaxlib.compile_program(Client(), open_device("cpu").handle, b"")

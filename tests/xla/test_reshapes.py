"""Pointwise operations between a reshape and its inverse are computed in the first shape."""

from collections.abc import Callable, Sequence
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
from dynamo_backends.xla.matmul_rewrites import drop_reshapes

Function = Callable[..., Sequence[jax.Array]]

A, B, C = (6, 4), (2, 3, 4), (24,)


def both(x: jax.Array) -> list[jax.Array]:
    y = lax.reshape(x, B)
    z = jnp.tanh(y) * y
    return [lax.reshape(z, A), z.sum(1)]


def twice(x: jax.Array) -> list[jax.Array]:
    y = lax.reshape(jnp.sin(lax.reshape(x, B)), A)
    return [lax.reshape(jnp.cos(lax.reshape(jnp.exp(y), B)), A), lax.reshape(y * 2, B)]


def of_two(x: jax.Array, y: jax.Array) -> list[jax.Array]:
    return [lax.reshape(lax.reshape(x, B) + 2 * lax.reshape(y, B), A)]


def chosen(x: jax.Array) -> list[jax.Array]:
    y = lax.reshape(x, B)
    return [lax.reshape(lax.select(y > 0, y, -y).astype(jnp.float16), A)]


CASES: dict[str, tuple[Function, list[tuple[int, ...]], int]] = {
    "one": (lambda x: [lax.reshape(jnp.tanh(lax.reshape(x, B)) + 1, A)], [A], 0),
    "none between": (lambda x: [lax.reshape(lax.reshape(x, B), A)], [A], 0),
    "read in the other shape": (both, [A], 1),
    "one after the other": (twice, [A], 2),
    "of two": (of_two, [A, A], 0),
    "of two shapes": (lambda x, y: of_two(x, y), [A, C], 3),
    "of another tensor": (lambda x, y: [lax.reshape(lax.reshape(x, B) + y, A)], [A, B], 2),
    "to a third shape": (lambda x: [lax.reshape(jnp.tanh(lax.reshape(x, B)), C)], [A], 2),
    "types": (chosen, [A], 0),
}


def read_reshapes(program: Any) -> int:
    """How many reshapes are left whose results somebody reads."""
    read = {*program.jaxpr.outvars}
    count = 0
    for eqn in reversed(program.jaxpr.eqns):
        if any(v in read for v in eqn.outvars):
            read |= {v for v in eqn.invars if not hasattr(v, "val")}
            count += eqn.primitive.name == "reshape"
    return count


@pytest.mark.parametrize("name", CASES)
def test_results_are_the_same(name: str) -> None:
    function, shapes, left = CASES[name]
    numbers = np.random.default_rng(0).standard_normal
    inputs = [numbers(shape, np.float32) for shape in shapes]
    program = jax.make_jaxpr(function)(*inputs)
    simpler = drop_reshapes(program)
    assert read_reshapes(simpler) == left
    results = prologue.as_function(simpler)(*inputs)
    for result, expected in zip(results, function(*inputs), strict=True):
        assert result.dtype == expected.dtype
        np.testing.assert_array_equal(result, expected)


def test_an_activation_is_written_over_its_operand(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the largest tensor of a transformer: two of them would be the most memory needed."""
    sizes: list[int] = []
    compile_with = _jaxlib._compile

    def compile_program(*args: Any) -> Any:
        executable = compile_with(*args)
        sizes.append(_jaxlib.temporary_bytes(executable))
        return executable

    monkeypatch.setattr(_jaxlib, "_compile", compile_program)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    x = torch.randn(4, 128, 64)
    options = {"fallback": "error", "cache": False, "verify": "off"}
    compiler = dynamo_backends.compiler("openxla", **options)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=compiler)(x), model(x))
    assert max(sizes) < 1.5 * x.shape[0] * x.shape[1] * 256 * 4

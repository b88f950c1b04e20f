"""Transposes that matrix products read through."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax
from torch import nn

import dynamo_backends
from dynamo_backends.xla import prologue
from dynamo_backends.xla.matmul_rewrites import fold_transposes


def array(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def product(left: tuple[int, ...], right: tuple[int, ...]) -> Callable[..., list[jax.Array]]:
    """Contracts these dimensions of the transpose of `w`, its dimensions in reverse order."""
    return lambda x, w: [lax.dot_general(x, w.transpose(2, 1, 0), ((left, right), ((), ())))]


CASES = {
    "x @ w.T": (lambda x, w: [x @ w.T], (1, 3), (4, 3), True),
    "x.T @ w": (lambda x, w: [x.T @ w], (3, 2), (3, 4), True),
    "both": (lambda x, w: [x.T @ w.T], (3, 2), (4, 3), True),
    "all but one": (product((0, 1), (0, 1)), (3, 4), (5, 4, 3), True),
    "free dimensions change places": (product((0,), (0,)), (3, 2), (5, 4, 3), False),
    "batched": (lambda x, w: [x @ w.transpose(0, 2, 1)], (2, 1, 3), (2, 4, 3), False),
    "read by others too": (lambda x, w: [x @ w.T, w.T], (1, 3), (4, 3), True),
}


@pytest.mark.parametrize("name", CASES)
def test_folded_where_the_result_stays_the_same(name: str):
    function, left, right, folds = CASES[name]
    x, w = array(*left), array(*right)
    program = jax.make_jaxpr(function)(x, w)
    folded = fold_transposes(program)
    for result, expected in zip(prologue.as_function(folded)(x, w), function(x, w), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    assert (operands(folded) != operands(program)) == folds
    assert operands(folded).isdisjoint(transposed(folded)) == folds


def operands(program: jax.extend.core.ClosedJaxpr) -> set:
    return {v for e in program.jaxpr.eqns if e.primitive.name == "dot_general" for v in e.invars}


def transposed(program: jax.extend.core.ClosedJaxpr) -> set:
    return {e.outvars[0] for e in program.jaxpr.eqns if e.primitive.name == "transpose"}


def test_a_linear_layer_of_one_row_does_not_copy_its_weight():
    model = nn.Linear(32, 48).eval()
    compiled = torch.compile(model, backend=dynamo_backends.compiler("openxla", cache=False))
    x = torch.randn(1, 32)
    with torch.no_grad(), dynamo_backends.record() as reports:
        torch.testing.assert_close(compiled(x), model(x))
    (block,) = reports[0].executable.static_program.blocks
    text = block.executable.main.hlo_modules()[0].to_string()
    assert " transpose(" not in text
    assert " copy(" not in text


def test_the_check_for_copies_can_fail():
    def one_row(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.dot(x, w.T, precision="highest") + b

    text = jax.jit(one_row).lower(array(1, 32), array(48, 32), array(48)).compile().as_text()
    assert " copy(" in text

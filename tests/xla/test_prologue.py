"""The split of a program into what depends on weights alone and the rest."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynamo_backends.xla import prologue

MATRIX = np.arange(9, dtype=np.float32).reshape(3, 3)


def split(fn: Callable[..., list[jax.Array]], weights: list, inputs: list) -> prologue.SplitProgram:
    """Splits a function and checks that both parts together compute what it computes."""
    traced = jax.make_jaxpr(fn)(*weights, *inputs)
    parts = prologue.split_prologue(traced, len(weights))
    prepared = []
    if parts.prologue is not None:
        prepared = prologue.as_function(parts.prologue)(*[weights[i] for i in parts.transformed])
    results = prologue.as_function(parts.main)(
        *[weights[i] for i in parts.untouched], *prepared, *[inputs[i] for i in parts.activations]
    )
    for r, e in zip(results, fn(*weights, *inputs), strict=True):
        np.testing.assert_allclose(r, e, rtol=1e-6)
    return parts


def ops(program: jax.extend.core.ClosedJaxpr) -> set[str]:
    return {eqn.primitive.name for eqn in program.jaxpr.eqns}


def test_arithmetic_on_weights_is_hoisted():
    parts = split(
        lambda w, s, x: [x @ (w * s)], [jnp.ones((3, 3)), jnp.ones(3)], [jnp.ones((2, 3))]
    )
    assert "mul" not in ops(parts.main)
    assert parts.transformed == (0, 1)
    assert parts.untouched == ()


def test_constants_take_part_in_the_prologue():
    parts = split(lambda w, x: [x @ jnp.dot(MATRIX, w)], [jnp.ones((3, 3))], [jnp.ones((2, 3))])
    assert parts.prologue is not None
    assert len([e for e in parts.main.jaxpr.eqns if e.primitive.name == "dot_general"]) == 1


def test_a_weight_that_is_only_transposed_for_a_product_is_read_as_it_is():
    parts = split(
        lambda w, b, x: [x @ w.T + b], [jnp.ones((4, 3)), jnp.ones(4)], [jnp.ones((2, 3))]
    )
    assert parts.prologue is None
    assert parts.untouched == (0, 1)


def test_a_transposed_weight_for_something_else_is_prepared():
    parts = split(lambda w, x: [x * w.T], [jnp.ones((4, 3))], [jnp.ones((3, 4))])
    assert parts.transformed == (0,)


def test_broadcasts_are_not_stored():
    parts = split(
        lambda w, x: [x + jnp.broadcast_to(w * 2, (100, 3))], [jnp.ones(3)], [jnp.ones((100, 3))]
    )
    assert parts.prologue is not None
    assert [v.aval.shape for v in parts.prologue.jaxpr.outvars] == [(3,)]


def test_unused_inputs_are_dropped():
    parts = split(
        lambda w, v, x, y: [y * w], [jnp.ones(3), jnp.ones(3)], [jnp.ones(3), jnp.ones(3)]
    )
    assert parts.untouched == (0,)
    assert parts.activations == (1,)


@pytest.mark.parametrize("which", [0, 1])
def test_outputs_that_are_inputs_or_depend_on_weights_alone(which: int):
    fn = [lambda w, x: [w, x], lambda w, x: [w * 2, x + 1]][which]
    parts = split(fn, [jnp.ones(3)], [jnp.ones(3)])
    assert (parts.prologue is None) == (which == 0)

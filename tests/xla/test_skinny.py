"""Products of a few rows with a large matrix, which is read in parts."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax import lax
from torch import nn

import dynamo_backends
from dynamo_backends.xla import matmul_rewrites, prologue

MATRIX = (768, 256)


def array(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def product(left: int, right: int) -> Callable[..., list[jax.Array]]:
    """Contracts these dimensions."""
    return lambda x, w: [lax.dot_general(x, w, (((left,), (right,)), ((), ())))]


CASES: dict[str, tuple[Callable[..., list[jax.Array]], Any, Any, int]] = {
    "one row": (product(1, 1), array(1, 256), array(*MATRIX), 4),
    "a vector": (product(0, 1), array(256), array(*MATRIX), 4),
    "some rows": (product(1, 1), array(5, 256), array(*MATRIX), 4),
    "rows in two dimensions": (product(2, 1), array(2, 3, 256), array(*MATRIX), 4),
    "rows as columns": (product(0, 1), array(256, 3), array(*MATRIX), 4),
    "the matrix first": (product(1, 1), array(*MATRIX), array(5, 256), 4),
    "of columns": (product(1, 0), array(5, 256), array(256, 768), 0),
    "many rows": (product(1, 1), array(matmul_rewrites.FEW + 1, 256), array(*MATRIX), 0),
    "a small matrix": (product(1, 1), array(5, 256), array(8, 256), 0),
    "a prime number of rows": (product(1, 1), array(5, 256), array(769, 256), 0),
    "in 64 bits": (product(1, 1), array(5, 256).astype("d"), array(*MATRIX).astype("d"), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_split_where_it_pays(name: str):
    """Into so many parts; 0: it is left as it is."""
    function, x, y, parts = CASES[name]
    with jax.enable_x64(True):
        program = jax.make_jaxpr(function)(x, y)
        split = matmul_rewrites.split_skinny(program, 4)
        (result,) = prologue.as_function(split)(x, y)
        np.testing.assert_allclose(result, function(x, y)[0], rtol=1e-4, atol=1e-4)
    (dot,) = [e for e in split.jaxpr.eqns if e.primitive.name == "dot_general"]
    _, batch = dot.params["dimension_numbers"]
    assert (dot.invars[0].aval.shape[0] if batch[0] else 0) == parts


def test_a_layer_reads_its_weight_where_it_is():
    """No copy of it is made, neither once nor at each call."""
    model = nn.Linear(256, 768).eval()
    compiled = torch.compile(model, backend=dynamo_backends.compiler("openxla", cache=False))
    x = torch.randn(4, 256)
    with torch.no_grad(), dynamo_backends.record() as reports:
        torch.testing.assert_close(compiled(x), model(x))
    (block,) = reports[0].executable.static_program.blocks
    assert block.executable.prologue is None
    statistics = block.executable.main.get_compiled_memory_stats()
    assert statistics.temp_size_in_bytes < model.weight.nbytes / 4

"""Prologues that torch runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import dynamo_backends
from dynamo_backends.xla.torch_prologue import TorchPrologue, jaxpr_to_torch_prologue

TABLE = np.arange(6, dtype=np.float32).reshape(2, 3)

PROLOGUES = {
    "arithmetic": lambda a, b: [(a + 2) * b - a / (b * b + 1), -jnp.sqrt(jnp.exp(a))],
    "scale": lambda a, b: [a * jax.lax.rsqrt(b[0] * b[0] + 1e-5), b[1]],
    "shapes": lambda a, b: [a.T.reshape(2, -1), a[None, :, 1], jnp.broadcast_to(a[0], (5, 3))],
    "stacks": lambda a, b: [jnp.stack([a, b], 1), jnp.stack([a[0], b[1], a[2]])],
    "slices": lambda a, b: [a[1:4:2, :2], jnp.concatenate([a, b], 1)],
    "one base, many views": lambda a, b: list((a @ b.T).T[:, :, None].transpose(2, 1, 0)[0]),
    "constants": lambda a, b: [jnp.einsum("ij,kj->ik", TABLE, a), b * TABLE[1]],
    "batched product": lambda a, b: [jnp.einsum("ij,ik->ikj", a, b)],
    "the same twice": lambda a, b: [a + b, a, a + b],
}


def arrays() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.standard_normal((4, 3)).astype(np.float32) for _ in range(2)]


@pytest.mark.parametrize("precision", ["highest", "medium"])
@pytest.mark.parametrize("name", PROLOGUES)
def test_equals_what_xla_computes(name: str, precision: str):
    given = arrays()
    program = jax.make_jaxpr(PROLOGUES[name])(*given)
    preparation = jaxpr_to_torch_prologue(program)
    assert preparation is not None
    expected = jax.core.eval_jaxpr(program.jaxpr, program.consts, *given)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        for each in (preparation, TorchPrologue.load(preparation.dump())):
            results = each([torch.from_numpy(a) for a in given])
            for result, value in zip(results, expected, strict=True):
                assert result.is_contiguous()
                np.testing.assert_allclose(result.numpy(), value, rtol=1e-6, atol=1e-6)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    "function",
    [
        lambda a: [jnp.sort(a)],
        lambda a: [a.astype(jnp.int32)],
        lambda a: [a.astype(jnp.bfloat16) * 2],
        lambda a: [a + np.zeros((5000, 4, 3), np.float32)],
    ],
    ids=["no instruction", "another dtype", "rounding", "a large constant"],
)
def test_what_has_no_instruction_is_left_to_xla(function):
    assert jaxpr_to_torch_prologue(jax.make_jaxpr(function)(arrays()[0])) is None


def test_unknown_instructions_are_refused():
    text = jaxpr_to_torch_prologue(jax.make_jaxpr(lambda a: [a + a])(arrays()[0])).dump()
    with pytest.raises(ValueError, match="unknown instructions: system"):
        TorchPrologue.load(text.replace(b'"add"', b'"system"'))


def test_results_do_not_keep_what_they_are_cut_from():
    program = jax.make_jaxpr(lambda a: list((a + 1).T[:, None]))(arrays()[0])
    first, *_ = jaxpr_to_torch_prologue(program)([torch.from_numpy(arrays()[0])])
    assert first.untyped_storage().nbytes() == first.numel() * 4


def test_a_folded_model_needs_one_executable():
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64)
    )
    for norm in (model[1], model[4]):
        nn.init.uniform_(norm.running_var, 0.5, 2)
        nn.init.normal_(norm.running_mean)
    model.eval()
    compiled = torch.compile(model, backend=dynamo_backends.compiler("openxla", cache=False))
    x = torch.randn(1, 3, 12, 12)
    with torch.no_grad(), dynamo_backends.record() as reports:
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
        model[0].weight.data *= 2
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    (block,) = reports[0].executable.static_program.blocks
    assert isinstance(block.executable.prologue, TorchPrologue)

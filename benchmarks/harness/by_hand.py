"""Training steps of `networks.Encoder` as one would write them by hand for `jax.jit`."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from networks import Encoder

Parameters = dict[str, jax.Array]


class HandWrittenSteps:
    """AdamW on the cross entropy of an encoder's scores; its arrays are donated.

    Parameters are copies of the model's, hyperparameters those of the optimizer.
    """

    def __init__(self, model: Encoder, optimizer: torch.optim.AdamW, device: Any):
        self._device = device
        heads = model.heads
        named = {name: _array(name, p) for name, p in model.named_parameters()}
        parameters = jax.device_put(named, device)
        zeros = jax.tree.map(jnp.zeros_like, parameters)
        self._state: Any = parameters, zeros, jax.tree.map(jnp.copy, zeros), self._put(0.0)
        loss = functools.partial(loss_of, heads=heads, layers=len(model.layers))
        group = optimizer.param_groups[0]
        update = functools.partial(
            adamw, **{name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        )
        self._step = jax.jit(functools.partial(_step, loss, update), donate_argnums=(0,))

    def __call__(self, ids: np.ndarray, targets: np.ndarray) -> jax.Array:
        """Takes a step; returns its loss, which may not be computed yet."""
        self._state, loss = self._step(self._state, self._put(ids), self._put(targets))
        return loss

    def _put(self, value: Any) -> jax.Array:
        return jax.device_put(value, self._device)


def _array(name: str, parameter: Tensor) -> np.ndarray:
    """A parameter as jax's users have it: matrices of linear layers from inputs to outputs."""
    values = parameter.detach().numpy()
    is_linear = name.endswith(".weight") and values.ndim == 2 and not name.startswith("words")
    return np.array(values.T if is_linear else values, order="C")


def _step(loss: Any, update: Any, state: Any, ids: jax.Array, targets: jax.Array) -> Any:
    value, gradients = jax.value_and_grad(loss)(state[0], ids, targets)
    return update(state, gradients), value


def loss_of(
    parameters: Mapping[str, jax.Array],
    ids: jax.Array,
    targets: jax.Array,
    *,
    heads: int,
    layers: int,
) -> jax.Array:
    """The cross entropy of the scores."""

    def linear(x: jax.Array, name: str) -> jax.Array:
        return x @ parameters[f"{name}.weight"] + parameters[f"{name}.bias"]

    def norm(x: jax.Array, name: str) -> jax.Array:
        mean = x.mean(-1, keepdims=True)
        centered = x - mean
        scale = jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-5)
        return centered * scale * parameters[f"{name}.weight"] + parameters[f"{name}.bias"]

    def attention(x: jax.Array, name: str) -> jax.Array:
        parts = linear(x, f"{name}.qkv").reshape(*x.shape[:2], 3, heads, -1)
        q, k, v = jnp.moveaxis(parts, 2, 0)
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return linear(mixed.reshape(x.shape), f"{name}.out")

    x = norm(parameters["words.weight"][ids] + parameters["positions"], "norm")
    for name in (f"layers.{i}" for i in range(layers)):
        x = norm(x + attention(x, name), f"{name}.attention_norm")
        inner = jax.nn.gelu(linear(x, f"{name}.up"), approximate=False)
        x = norm(x + linear(inner, f"{name}.down"), f"{name}.norm")
    scores = jax.nn.log_softmax(linear(x, "scores"))
    return -jnp.take_along_axis(scores, targets[..., None], axis=-1).mean()


def adamw(
    state: Any,
    gradients: Parameters,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> Any:
    """The state after an update: parameters, averages of gradients and of their squares, steps."""
    parameters, averages, squares, count = state
    count = count + 1
    first, second = (1 - beta**count for beta in betas)
    averages = jax.tree.map(lambda m, g: betas[0] * m + (1 - betas[0]) * g, averages, gradients)
    squares = jax.tree.map(lambda v, g: betas[1] * v + (1 - betas[1]) * g * g, squares, gradients)

    def updated(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        return p * (1 - lr * weight_decay) - lr / first * m / (jnp.sqrt(v / second) + eps)

    return jax.tree.map(updated, parameters, averages, squares), averages, squares, count

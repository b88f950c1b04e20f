"""Recurrent layers that torch hands over whole, as one XLA loop over time."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from torch import fx

from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.registry import lowers

_LSTM = 2  # at::native's numbering of recurrent modes


def _is_plain_lstm(node: fx.Node) -> str | None:
    return _why_not(node.args[9], node.args[11], node.args[13])


def _is_plain_lstm_backward(node: fx.Node) -> str | None:
    return _why_not(node.args[14], node.args[16], node.args[19])


def _why_not(mode: object, layers: object, bidirectional: object) -> str | None:
    if mode != _LSTM:
        return "only LSTM layers are lowered"
    return "it is more than one layer" if layers != 1 or bidirectional else None


@lowers("mkldnn_rnn_layer.default", when=_is_plain_lstm)
def lstm_layer(
    ctx: Context,
    input: jax.Array,
    weight0: jax.Array,
    weight1: jax.Array,
    weight2: jax.Array,
    weight3: jax.Array,
    hx_: jax.Array,
    cx_: jax.Array,
    reverse: bool,
    batch_sizes: Sequence[int],
    mode: int,
    hidden_size: int,
    num_layers: int,
    has_biases: bool,
    *_: object,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """One LSTM layer over a sequence, in one direction.

    Args:
        ctx: The call.
        input: (time, batch, features).
        weight0: Input weights, (4 * hidden, features), gates in the order i, f, g, o.
        weight1: Recurrent weights, (4 * hidden, hidden).
        weight2: Input bias, (4 * hidden,); without `has_biases` any zeros.
        weight3: Recurrent bias, likewise.
        hx_: First hidden state, (batch, hidden) after its leading dimensions of size 1.
        cx_: First cell state, likewise.
        reverse: Whether time runs backwards.
        batch_sizes: Of packed sequences, which do not come here.
        mode: Which kind of network it is.
        hidden_size: Features of the states.
        num_layers: 1.
        has_biases: Whether there are biases.
        _: What is the same for every call that is taken.

    Returns:
        Outputs (time, batch, hidden), last hidden and cell state in the shapes of `hx_` and
        `cx_`, and an empty workspace.
    """
    bias = _bias(input, weight2, weight3, has_biases)
    outputs, h, c = _layer(ctx, reverse, input, weight0, weight1, bias, hx_, cx_)
    return outputs, h, c, jnp.zeros((0,), jnp.uint8)


@lowers("mkldnn_rnn_layer_backward.default", when=_is_plain_lstm_backward)
def lstm_layer_backward(
    ctx: Context,
    input: jax.Array,
    weight1: jax.Array,
    weight2: jax.Array,
    weight3: jax.Array,
    weight4: jax.Array,
    hx_: jax.Array,
    cx_tmp: jax.Array,
    output: jax.Array,
    hy_: jax.Array,
    cy_: jax.Array,
    grad_output: jax.Array | None,
    grad_hy: jax.Array | None,
    grad_cy: jax.Array | None,
    reverse: bool,
    mode: int,
    hidden_size: int,
    num_layers: int,
    has_biases: bool,
    *_: object,
) -> tuple[jax.Array, ...]:
    """Gradients of `lstm_layer`: input, both weights, both biases, hidden and cell state.

    The gates are computed again: the forward's workspace has oneDNN's own form in eager.
    """
    bias = _bias(input, weight3, weight4, has_biases)
    given = (input, weight1, weight2, bias, hx_, cx_tmp)
    inputs = [a.astype(_wide(input)) for a in given]
    results, pull_back = jax.vjp(functools.partial(_layer, ctx, reverse), *inputs)
    tangents = tuple(
        jnp.zeros_like(r) if g is None else g.astype(r.dtype).reshape(r.shape)
        for r, g in zip(results, (grad_output, grad_hy, grad_cy), strict=True)
    )
    x, w_input, w_state, b, h, c = pull_back(tangents)
    return x, w_input, w_state, b, b, h, c


def _bias(input: jax.Array, first: jax.Array, second: jax.Array, is_given: bool) -> jax.Array:
    if not is_given:
        return jnp.zeros(first.shape[:1], _wide(input))
    return first.astype(_wide(input)) + second


def _wide(input: jax.Array) -> jnp.dtype:
    return jnp.promote_types(input.dtype, jnp.float32)


def _layer(
    ctx: Context,
    reverse: bool,
    input: jax.Array,
    w_input: jax.Array,
    w_state: jax.Array,
    bias: jax.Array,
    hx: jax.Array,
    cx: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Outputs, last hidden and last cell state, in at least float32."""
    x, w_input, w_state, h, c = (a.astype(_wide(input)) for a in (input, w_input, w_state, hx, cx))
    gates = jnp.einsum("tbf,gf->tbg", x, w_input, precision=ctx.precision) + bias
    batch, hidden = x.shape[1], w_state.shape[1]

    def step(
        state: tuple[jax.Array, jax.Array], from_input: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        h, c = state
        z = from_input + jnp.matmul(h, w_state.T, precision=ctx.precision)
        i, f, g, o = jnp.split(z, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    state = (h.reshape(batch, hidden), c.reshape(batch, hidden))
    (h, c), outputs = jax.lax.scan(step, state, gates, reverse=reverse)
    return outputs, h.reshape(hx.shape), c.reshape(cx.shape)

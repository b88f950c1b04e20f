"""Recurrent layers that torch hands over whole, as one XLA loop over time."""

import jax
import jax.numpy as jnp
from torch import fx

from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.registry import lowers

_LSTM = 2  # at::native's numbering of recurrent modes


def _is_plain_lstm(node: fx.Node) -> str | None:
    mode, layers, bidirectional = node.args[9], node.args[11], node.args[13]
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
    *_: object,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """One LSTM layer over a sequence, in one direction.

    Args:
        ctx: The call.
        input: (time, batch, features).
        weight0: Input weights, (4 * hidden, features), gates in the order i, f, g, o.
        weight1: Recurrent weights, (4 * hidden, hidden).
        weight2: Input bias, (4 * hidden,).
        weight3: Recurrent bias, (4 * hidden,).
        hx_: First hidden state, (batch, hidden) after its leading dimensions of size 1.
        cx_: First cell state, likewise.
        reverse: Whether time runs backwards.
        _: What is the same for every call that is taken.

    Returns:
        Outputs (time, batch, hidden), last hidden and cell state in the shapes of `hx_` and
        `cx_`, and an empty workspace.
    """
    wide = jnp.promote_types(input.dtype, jnp.float32)
    x, w_input, w_state, h, c = (a.astype(wide) for a in (input, weight0, weight1, hx_, cx_))
    bias = weight2.astype(wide) + weight3.astype(wide)
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
    return outputs, h.reshape(hx_.shape), c.reshape(cx_.shape), jnp.zeros((0,), jnp.uint8)

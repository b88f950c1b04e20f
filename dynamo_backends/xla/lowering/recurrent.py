"""Recurrent layers that torch hands over whole, as one XLA loop over time in each direction.

Only what depends on the step before is in the loops: products with the input, and the gradients of
input and weights, are products over all steps at once.
"""

import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from torch import fx

import dynamo_backends.graph.lstm  # noqa: F401 - declares two of the operators
from dynamo_backends.graph.call_arguments import get_argument
from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.registry import by_name, register_lowering

_LSTM = 2  # at::native's numbering of recurrent modes


def _why_not(node: fx.Node) -> str | None:
    if get_argument(node, "mode") != _LSTM:
        return "only LSTM layers are lowered"
    several = get_argument(node, "num_layers") != 1 or get_argument(node, "bidirectional")
    return "it is more than one layer" if several else None


@register_lowering("mkldnn_rnn_layer.default", "dynamo_backends::lstm_layer.default", when=_why_not)
@by_name
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
    has_biases: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns one LSTM layer over a sequence, in one direction.

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
        has_biases: Whether there are biases.

    Returns:
        Outputs (time, batch, hidden), last hidden and cell state in the shapes of `hx_` and
        `cx_`, and an empty workspace.
    """
    bias = _bias(input, weight2, weight3, has_biases)
    (h, c), run = _layer(ctx, reverse, input, weight0, weight1, bias, hx_, cx_)
    ctx.saved[ctx.node] = run
    no_workspace = jnp.zeros((0,), jnp.uint8)
    return run.hidden, h.reshape(hx_.shape), c.reshape(cx_.shape), no_workspace


@register_lowering(
    "mkldnn_rnn_layer_backward.default",
    "dynamo_backends::lstm_layer_backward.default",
    when=_why_not,
)
@by_name
def lstm_layer_backward(
    ctx: Context,
    input: jax.Array,
    weight1: jax.Array,
    weight2: jax.Array,
    weight3: jax.Array,
    weight4: jax.Array,
    hx_: jax.Array,
    cx_tmp: jax.Array,
    grad_output: jax.Array | None,
    grad_hy: jax.Array | None,
    grad_cy: jax.Array | None,
    reverse: bool,
    has_biases: bool,
) -> tuple[jax.Array, ...]:
    """Gradients of `lstm_layer`: input, both weights, both biases, hidden and cell state.

    If the forward is not in the same graph, the gates are computed again: the forward's workspace
    has oneDNN's own form in eager.
    """
    forward = _source(ctx.node.args[7])
    run = ctx.saved.get(forward) if forward is not None else None
    if run is None:
        bias = _bias(input, weight3, weight4, has_biases)
        _, run = _layer(ctx, reverse, input, weight1, weight2, bias, hx_, cx_tmp)
    wide = _wide(input)
    x, w_input, w_state = (a.astype(wide) for a in (input, weight1, weight2))
    h_first, c_first = (a.astype(wide).reshape(run.cell.shape[1:]) for a in (hx_, cx_tmp))
    dh, dc = (
        jnp.zeros_like(h_first) if g is None else g.astype(wide).reshape(h_first.shape)
        for g in (grad_hy, grad_cy)
    )
    from_above = jnp.zeros_like(run.hidden) if grad_output is None else grad_output.astype(wide)
    h_before, c_before = (
        _shifted(first, values, reverse)
        for first, values in ((h_first, run.hidden), (c_first, run.cell))
    )

    def step(state: _State, given: tuple[jax.Array, ...]) -> tuple[_State, jax.Array]:
        dh, dc = state
        from_above, c, before, gates = given
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        dh, out = dh + from_above, jnp.tanh(c)
        dc = dc + dh * o * (1 - out * out)
        di, df, dg = dc * g * i * (1 - i), dc * before * f * (1 - f), dc * i * (1 - g * g)
        dz = jnp.concatenate([di, df, dg, dh * out * o * (1 - o)], axis=-1)
        return (jnp.matmul(dz, w_state, precision=ctx.precision), dc * f), dz

    over = (from_above, run.cell, c_before, run.gates)
    (dh, dc), dz = jax.lax.scan(step, (dh, dc), over, reverse=not reverse)
    dx = jnp.einsum("tbg,gf->tbf", dz, w_input, precision=ctx.precision)
    dw_input = jnp.einsum("tbg,tbf->gf", dz, x, precision=ctx.precision)
    dw_state = jnp.einsum("tbg,tbh->gh", dz, h_before, precision=ctx.precision)
    # Without biases torch gives zeros in their place, of any shape, and reads no gradient of them.
    db = dz.sum((0, 1)) if has_biases else jnp.zeros(ctx.out[3].shape)
    return dx, dw_input, dw_state, db, db, dh.reshape(hx_.shape), dc.reshape(cx_tmp.shape)


def _source(node: object) -> fx.Node | None:
    """Returns the layer that a node is the first result of."""
    if isinstance(node, fx.Node) and node.target is operator.getitem and node.args[1] == 0:
        source = node.args[0]
        return source if isinstance(source, fx.Node) else None
    return None


def _shifted(first: jax.Array, values: jax.Array, reverse: bool) -> jax.Array:
    """Returns what each step found: the values of the step before, ``(time, batch, hidden)``."""
    if reverse:
        return jnp.concatenate([values[1:], first[None]])
    return jnp.concatenate([first[None], values[:-1]])


def _bias(input: jax.Array, first: jax.Array, second: jax.Array, is_given: bool) -> jax.Array:
    if not is_given:
        return jnp.zeros(first.shape[:1], _wide(input))
    return first.astype(_wide(input)) + second


def _wide(input: jax.Array) -> jnp.dtype:
    return jnp.promote_types(input.dtype, jnp.float32)


_State = tuple[jax.Array, jax.Array]


class _Steps(NamedTuple):
    """The products that a layer computes for all steps, in at least float32.

    Attributes:
        hidden: After each step, (time, batch, hidden).
        cell: Likewise.
        gates: i, f, g, o of each step, (time, batch, 4 * hidden).
    """

    hidden: jax.Array
    cell: jax.Array
    gates: jax.Array


def _layer(
    ctx: Context,
    reverse: bool,
    input: jax.Array,
    w_input: jax.Array,
    w_state: jax.Array,
    bias: jax.Array,
    hx: jax.Array,
    cx: jax.Array,
) -> tuple[_State, _Steps]:
    """Returns the last hidden and cell state, and all steps."""
    x, w_input, w_state, h, c = (a.astype(_wide(input)) for a in (input, w_input, w_state, hx, cx))
    from_input = jnp.einsum("tbf,gf->tbg", x, w_input, precision=ctx.precision) + bias
    batch, hidden = x.shape[1], w_state.shape[1]
    transposed = w_state.T  # in the loop it would be transposed in each step

    def step(state: _State, from_input: jax.Array) -> tuple[_State, _Steps]:
        h, c = state
        z = from_input + jnp.matmul(h, transposed, precision=ctx.precision)
        i, f, g, o = jnp.split(z, 4, axis=-1)
        i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
        c = f * c + i * g
        h = o * jnp.tanh(c)
        return (h, c), _Steps(h, c, jnp.concatenate([i, f, g, o], axis=-1))

    state = (h.reshape(batch, hidden), c.reshape(batch, hidden))
    return jax.lax.scan(step, state, from_input, reverse=reverse)

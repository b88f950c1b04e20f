"""Tensors that are made of sizes, and numbers that are sizes."""

import jax.numpy as jnp

from dynamo_backends.graph.symbolic_sizes import SizeWithExpression
from dynamo_backends.xla.lowering.padded.call import PaddedCall, Placed
from dynamo_backends.xla.lowering.padded.registry import register_padding_rule


@register_padding_rule(
    "full.default",
    "zeros.default",
    "ones.default",
    "empty.memory_format",
    "new_zeros.default",
    "new_empty.default",
    "new_ones.default",
    "new_full.default",
    shapes=("size",),
)
def filled(call: PaddedCall) -> Placed:
    return call.run(), call.fresh()


@register_padding_rule("arange.default", "arange.start", "arange.start_step", shapes=("end",))
def arange(call: PaddedCall) -> Placed:
    return call.run(), call.fresh()


@register_padding_rule("scalar_tensor.default", shapes=("s",))
def scalar_tensor(call: PaddedCall) -> Placed:
    value = call.value("s")
    return jnp.asarray(call.number(value)) if isinstance(
        value, SizeWithExpression
    ) else call.run(), ()

"""Collectives of torch's own distributed programs, over all processes (see `mesh.local`)."""

from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import fx

from dynamo_backends import _torch_private as private
from dynamo_backends.runtime.ranks import is_multiprocess
from dynamo_backends.xla.lowering.context import Context
from dynamo_backends.xla.lowering.registry import by_name, lookup, register_lowering

AXIS = "processes"
"""What the dimension of the mesh is called that has one device of each process."""

NAMESPACE = "_c10d_functional"

_REDUCED = {"sum": jax.lax.psum, "avg": jax.lax.pmean, "max": jax.lax.pmax, "min": jax.lax.pmin}


def is_collective(node: fx.Node) -> bool:
    """Returns whether a call exchanges data with other processes; waiting does not."""
    return getattr(node.target, "namespace", "") == NAMESPACE and not is_wait(node)


def is_wait(node: fx.Node) -> bool:
    """Returns whether a call waits for the result of a collective."""
    return node.target is torch.ops._c10d_functional.wait_tensor.default


def _argument(node: fx.Node, name: str) -> Any:
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    return dict(zip(names, node.args, strict=False) | node.kwargs.items()).get(name)


def _why_apart(name: object) -> str | None:
    """Returns why collectives of a process group are left to torch; None: they need not be."""
    if not isinstance(name, str):
        return "its process group is not known at compile time"
    if not is_multiprocess():
        return "torch.distributed has only one process"
    group = private.process_group(name)
    if group is None:
        return f"the process group {name!r} does not exist any more"
    ranks = torch.distributed.get_process_group_ranks(group)
    size = torch.distributed.get_world_size()
    if ranks != list(range(size)):
        return f"its process group has ranks {ranks}, but XLA collectives need all {size} ranks"
    backend = private.cpu_backend(group)
    return None if backend == "gloo" else f"its process group uses {backend}, not gloo"


def _of_group(node: fx.Node) -> str | None:
    reason = _why_apart(_argument(node, "group_name"))
    if reason is None and node.meta["val"].is_complex():
        return "XLA does not run collectives on complex numbers"
    return reason


def _reducing(node: fx.Node) -> str | None:
    how = _argument(node, "reduce_op")
    if how not in _REDUCED:
        return f"XLA does not support the reduction {how!r}"
    if how == "avg" and not node.meta["val"].is_floating_point():
        return "XLA does not support averages of integers"
    return _of_group(node)


def _summing(node: fx.Node) -> str | None:
    if (how := _argument(node, "reduce_op")) not in ("sum", "avg"):
        return f"XLA does not support reduce_scatter with {how!r}"
    return _reducing(node)


def _in_equal_parts(node: fx.Node) -> str | None:
    for name in ("output_split_sizes", "input_split_sizes"):
        if len(set(_argument(node, name) or ())) > 1:
            return "XLA does not support different split sizes"
    return _of_group(node)


def _awaited(node: fx.Node) -> str | None:
    awaited: Any = node.args[0]
    while is_wait(awaited):
        awaited = awaited.args[0]
    row = lookup(awaited.target) if isinstance(awaited, fx.Node) else None
    if row is None or not is_collective(awaited):
        return "it waits for a collective that torch runs"
    return row.when(awaited) if row.when is not None else None


@register_lowering("_c10d_functional::wait_tensor.default", when=_awaited)
def wait_tensor(x: jax.Array) -> jax.Array:
    return x


@register_lowering("_c10d_functional::all_reduce.default", when=_reducing)
@by_name
def all_reduce(ctx: Context, input: jax.Array, reduce_op: str) -> jax.Array:
    return _REDUCED[reduce_op](input, AXIS)


@register_lowering("_c10d_functional::all_gather_into_tensor.default", when=_of_group)
@by_name
def all_gather_into_tensor(ctx: Context, input: jax.Array) -> jax.Array:
    return jax.lax.all_gather(input, AXIS).reshape(ctx.out.shape)


@register_lowering("_c10d_functional::reduce_scatter_tensor.default", when=_summing)
@by_name
def reduce_scatter_tensor(
    ctx: Context, input: jax.Array, reduce_op: str, group_size: int
) -> jax.Array:
    total = jax.lax.psum_scatter(input, AXIS, scatter_dimension=0, tiled=True)
    return total / group_size if reduce_op == "avg" else total


@register_lowering("_c10d_functional::all_to_all_single.default", when=_in_equal_parts)
@by_name
def all_to_all_single(ctx: Context, input: jax.Array) -> jax.Array:
    return jax.lax.all_to_all(input, AXIS, split_axis=0, concat_axis=0, tiled=True)


@register_lowering("_c10d_functional::broadcast.default", when=_of_group)
@by_name
def broadcast(ctx: Context, input: jax.Array, src: int) -> jax.Array:
    """As a sum of bits: jaxlib has no broadcast through gloo."""
    is_source = jax.lax.axis_index(AXIS) == src
    if input.dtype == jnp.bool_:
        return jax.lax.psum((input & is_source).astype(jnp.uint8), AXIS).astype(jnp.bool_)
    words = jnp.dtype(f"uint{8 * input.dtype.itemsize}")
    bits = jnp.where(is_source, jax.lax.bitcast_convert_type(input, words), jnp.zeros((), words))
    return jax.lax.bitcast_convert_type(jax.lax.psum(bits, AXIS), input.dtype)

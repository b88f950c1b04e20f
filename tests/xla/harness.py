"""Runs single operators through the lowering table, without Dynamo or the pipeline."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from dynamo_backends.graph.decomposition_tables import decomposition_table
from dynamo_backends.xla.arrays import tensor_from_numpy, tensor_to_numpy
from dynamo_backends.xla.lowering import registry
from dynamo_backends.xla.lowering.context import LoweringOptions
from dynamo_backends.xla.lowering.interpreter import GraphLowering
from dynamo_backends.xla.lowering.values import to_logical_array


def capture(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[torch.fx.GraphModule, list]:
    """A functional, decomposed ATen graph of `fn`, and its tensor inputs."""
    flat, spec = pytree.tree_flatten((args, kwargs))
    places = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]

    def on_tensors(*tensors: torch.Tensor) -> list[Any]:
        filled = list(flat)
        for i, t in zip(places, tensors, strict=True):
            filled[i] = t
        a, k = pytree.tree_unflatten(filled, spec)
        return pytree.tree_leaves(fn(*a, **k))

    tensors = [flat[i] for i in places]
    table = decomposition_table(keep=set(registry.overloads()))
    functional = torch.func.functionalize(on_tensors, remove="mutations_and_views")
    gm = make_fx(functional, decomposition_table=table, tracing_mode="fake")(*tensors)
    gm.graph.eliminate_dead_code()
    return gm, tensors


def run(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """The flattened results of `fn`, computed by XLA through the lowering table."""
    gm, tensors = capture(fn, *args, **kwargs)
    constants = {}
    for node in list(gm.graph.nodes):
        if node.op == "get_attr":
            constants[node.target] = getattr(gm, node.target)
            with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
                place = gm.graph.placeholder(node.target)
            place.meta["val"] = node.meta.get("val", constants[node.target])
            node.replace_all_uses_with(place)
            gm.graph.erase_node(node)
    inputs = [*reversed(constants.values()), *tensors]

    def traced(*arrays: jax.Array) -> list[Any]:
        return [to_logical_array(v) for v in GraphLowering(gm.graph, LoweringOptions())(arrays)]

    with jax.enable_x64(True):
        results = jax.jit(traced)(*[tensor_to_numpy(t) for t in inputs])
        return [tensor_from_numpy(np.array(r)) if isinstance(r, jax.Array) else r for r in results]

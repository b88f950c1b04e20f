"""Takes single calls apart by torch's own decompositions, where ONNX has nothing for them whole."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from dynamo_backends import _torch_private as private
from dynamo_backends.errors import LoweringError
from dynamo_backends.ort.rules import is_lowered


@functools.cache
def _rules() -> dict[Any, Callable[..., Any]]:
    rules = private.all_decompositions()
    return {op: rule for op, rule in rules.items() if not is_lowered(op)}


def has_decomposition(op: Any) -> bool:
    """Whether torch can take an operator apart."""
    return op in private.all_decompositions()


def expand(node: fx.Node) -> None:
    """Replaces a call in its graph by simpler calls, whose `meta["expanded_from"]` names it.

    Raises:
        LoweringError: torch's decomposition does not lead to functional calls.
    """
    graph = node.graph
    traced = _trace(node)
    sources = iter(node.all_input_nodes)
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op == "placeholder":
                copies[inner] = next(sources)
            elif inner.op == "call_function" and inner.target is not node.target:
                copies[inner] = graph.node_copy(inner, copies.__getitem__)
                copies[inner].meta = {"val": inner.meta["val"], "expanded_from": node.name}
            elif inner.op != "output":
                reason = f"its decomposition contains {inner.target}"
                raise LoweringError(node.name, str(node.target), reason)
    results = fx.map_arg(traced.graph.output_node().args[0], copies.__getitem__)
    _replace(node, results)


def _replace(node: fx.Node, results: Any) -> None:
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(results)
    else:
        for user in list(node.users):
            if user.target is not operator.getitem:
                raise LoweringError(node.name, str(node.target), "its results are used as a list")
            user.replace_all_uses_with(results[user.args[1]])
            node.graph.erase_node(user)
    node.graph.erase_node(node)
    # Parts of the decomposition that only compute results which nobody uses.
    node.graph.eliminate_dead_code()


def _trace(node: fx.Node) -> fx.GraphModule:
    inputs = node.all_input_nodes
    mode = private.FakeTensorMode()
    with mode:
        fakes = [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device)
            for v in (n.meta["val"] for n in inputs)
        ]
    target: Any = node.target

    def call(*tensors: torch.Tensor) -> Any:
        known = dict(zip(inputs, tensors, strict=True))
        args = fx.map_arg(node.args, known.__getitem__)
        kwargs = fx.map_arg(node.kwargs, known.__getitem__)
        return target(*args, **kwargs)

    rules = {**_rules(), target: private.all_decompositions()[target]}
    try:
        with mode:
            return private.make_fx(torch.func.functionalize(call), rules)(*fakes)
    except Exception as error:
        reason = f"torch cannot take it apart ({type(error).__name__})"
        raise LoweringError(node.name, str(target), reason) from error

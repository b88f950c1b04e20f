"""Calls whose results XLA's simplifier must not see together with the calls that read them.

Programs for CPUs are compiled without the simplifier. On other platforms it stays, and what it
would compute in another way than eager goes through `optimization_barrier`: constants that it would
merge or cancel (`(x + c) - c`, `x * 1e30 * 1e30`), and functions that it takes for inverses of each
other (`log(exp(x))`, `sqrt(x * x)`, `exp(x) * exp(y)`, `x / exp(y)`). A barrier also keeps the two
calls out of one loop, so there are none for sums and products of several tensors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from jax import lax
from torch import fx

from dynamo_backends.graph.aliasing import is_view
from dynamo_backends.xla.lowering.values import ChannelsLast, Flat

_SUMS = frozenset({"add", "sub", "rsub"})
_PRODUCTS = frozenset({"mul", "div", "reciprocal"})
_FUNCTIONS = frozenset(
    {"exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "pow", "rsqrt", "sqrt"}
)
_CONTRACTIONS = frozenset({"addmm", "baddbmm", "bmm", "convolution", "dot", "mm", "mv"})
_CONSTANTS = frozenset({"full", "full_like", "ones", "ones_like", "scalar_tensor"})


def barred(graph: fx.Graph) -> frozenset[fx.Node]:
    """Returns the calls whose results go through a barrier."""
    return frozenset(source for node in graph.nodes for source in _hidden_from(node))


def hide(value: Any) -> Any:
    """Returns a result that XLA takes for any value of its type."""
    if isinstance(value, ChannelsLast | Flat):
        return replace(value, array=lax.optimization_barrier(value.array))
    return lax.optimization_barrier(value)


def _hidden_from(node: fx.Node) -> Iterator[fx.Node]:
    """Which calls that a call reads it must not be simplified with."""
    family = _family(node)
    sources = [_behind_views(source) for source in node.all_input_nodes]
    if family in (_SUMS, _PRODUCTS):
        for source in sources:
            if _family(source) is family and _may_merge(node, source):
                yield source
        if family is _PRODUCTS:
            yield from _factors(node, sources)
    elif family is _FUNCTIONS:
        yield from (s for s in sources if _family(s) is _FUNCTIONS or _is_square(s))
    elif family is _CONTRACTIONS:
        scaled = [s for s in sources if _family(s) is _PRODUCTS and _has_constant(s)]
        if len(scaled) > 1 or any(_is_scaling(user) for user in node.users):
            yield from scaled


def _factors(node: fx.Node, sources: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """Functions that are multiplied by each other or that divide: exp(x) * exp(y), x / exp(y)."""
    functions = [s for s in sources if _family(s) is _FUNCTIONS]
    if _name(node) == "mul":
        squared = len(sources) == 1 and not _has_constant(node)
        yield from functions if len(functions) > 1 or squared else ()
    else:
        yield from functions


def _may_merge(node: fx.Node, source: fx.Node) -> bool:
    """Returns whether two sums or two products have a constant each, or an operand in common."""
    if _has_constant(node) and _has_constant(source):
        return True
    theirs = {_behind_views(n) for n in source.all_input_nodes}
    return any(_behind_views(n) in theirs for n in node.all_input_nodes)


def _is_scaling(node: fx.Node) -> bool:
    return _family(node) is _PRODUCTS and _has_constant(node)


def _has_constant(node: fx.Node) -> bool:
    if _name(node) == "reciprocal":
        return True
    operands = [_behind_views(x) if isinstance(x, fx.Node) else x for x in node.args[:2]]
    return any(not isinstance(x, fx.Node) or _name(x) in _CONSTANTS for x in operands)


def _is_square(node: fx.Node) -> bool:
    return _name(node) == "mul" and node.args[0] is node.args[1]


def _behind_views(node: fx.Node) -> fx.Node:
    while is_view(node):
        source = node.args[0]
        if not isinstance(source, fx.Node):
            break
        node = source
    return node


def _family(node: fx.Node) -> frozenset[str] | None:
    name = _name(node)
    families = (_SUMS, _PRODUCTS, _FUNCTIONS, _CONTRACTIONS)
    return next((family for family in families if name in family), None)


def _name(node: fx.Node) -> str:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return ""
    return target._schema.name.partition("::")[2]

"""Runs a functional ATen graph on jax tracers, one look-up per node, with barriers where needed.

Convolutions leave their result stored channels last, and pointwise operators, pooling,
normalisation and concatenation keep it so: the layout is chosen once for a whole chain, and
transposes appear only where an operator needs torch's dimension order. What a training step updates
comes with one dimension, and pointwise operators keep it so: XLA's loops use vectors along the last
dimension only, which for the kernels of convolutions is three elements long.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch import fx

from dynamo_backends.graph.aliasing import is_view
from dynamo_backends.interface.errors import LoweringError
from dynamo_backends.xla import _jaxlib
from dynamo_backends.xla.dtypes import to_jax
from dynamo_backends.xla.lowering.context import Context, LoweringOptions
from dynamo_backends.xla.lowering.registry import (
    Layout,
    Lowering,
    Promotion,
    computation_dtype,
    lookup,
)
from dynamo_backends.xla.lowering.values import (
    ChannelsLast,
    Flat,
    Value,
    channels_last,
    to_flat_array,
    to_logical_array,
)


class GraphLowering:
    """Lowers one graph; call it under a jax trace with 64-bit types enabled.

    Args:
        graph: The graph.
        options: Options of all its calls.
    """

    def __init__(self, graph: fx.Graph, options: LoweringOptions):
        self._graph = graph
        self._options = options
        self._values: dict[fx.Node, Any] = {}
        self._logical: dict[fx.Node, Any] = {}
        self._kept: dict[fx.Node, Any] = {}
        self._barred = (
            find_barrier_nodes(graph)
            if _jaxlib.runs_algebraic_simplifier(options.platform)
            else frozenset()
        )

    def __call__(self, inputs: Sequence[Value | Flat]) -> list[Any]:
        """Traces the graph with jax's tracers.

        Args:
            inputs: One value per placeholder, in order.

        Returns:
            The graph's outputs, in any way of storing; non-tensor outputs as they are.

        Raises:
            LoweringError: An operator cannot be lowered; it names the node.
        """
        remaining = iter(inputs)
        for node in self._graph.nodes:
            if node.op == "placeholder":
                self._values[node] = next(remaining)
            elif node.op == "call_function":
                self._values[node] = self._call(node)
            elif node.op == "output":
                return [self._values[a] if isinstance(a, fx.Node) else a for a in node.args[0]]
            else:
                raise LoweringError(
                    node.name, str(node.target), f"unexpected node with op {node.op}"
                )
        raise LoweringError("output", "output", "the graph has no output node")

    def _call(self, node: fx.Node) -> Any:
        if node.target is operator.getitem:
            source, index = node.args
            return self._values[source][index]  # type: ignore[index]
        lowering = lookup(node.target)
        if lowering is None:
            raise LoweringError(node.name, str(node.target), "it has no lowering")
        context = Context(node, self._options, self._kept)
        try:
            result = self._apply(lowering, context)
            result = conform(result, node.meta["val"])
            return add_optimization_barrier(result) if node in self._barred else result
        except LoweringError:
            raise
        except Exception as error:
            raise LoweringError(
                node.name, str(node.target), f"{type(error).__name__}: {error}"
            ) from error

    def _apply(self, lowering: Lowering, context: Context) -> Any:
        node = context.node
        prefix = (context,) if lowering.wants_context else ()
        if lowering.layout is Layout.RAW:
            read = self._read_raw
        elif lowering.layout is Layout.POINTWISE:
            return self._apply_pointwise(lowering, context, prefix)
        else:
            read = self._read_logical
        args, kwargs = self._arguments(node, read)
        return lowering.fn(*prefix, *args, **kwargs)

    def _arguments(
        self, node: fx.Node, read: Callable[[fx.Node], Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Returns what a lowering is called with."""
        return fx.map_arg(node.args, read), fx.map_arg(node.kwargs, read)

    def _apply_pointwise(
        self, lowering: Lowering, context: Context, prefix: tuple[Context, ...]
    ) -> Any:
        node = context.node
        read, wrap = self._storage_of_pointwise(node)
        args: list[Any] = list(fx.map_arg(node.args, read))
        kwargs = fx.map_arg(node.kwargs, read)
        if lowering.promotion is not Promotion.NONE:
            fakes = fx.map_arg(node.args, lambda n: n.meta["val"])
            dtype = to_jax(computation_dtype(lowering, fakes))
            for i in range(*lowering.operands.indices(len(args))):
                if args[i] is not None:
                    args[i] = jnp.asarray(args[i]).astype(dtype)
        return wrap(lowering.fn(*prefix, *args, **kwargs))

    def _storage_of_pointwise(
        self, node: fx.Node
    ) -> tuple[Callable[[fx.Node], Any], Callable[[Any], Any]]:
        """Returns in which layout to read a pointwise call's operands and store its result.

        Operands of one dimension win if none has to be broadcast, then those stored channels last.
        """
        shape = tuple(node.meta["val"].shape)
        values = {n: self._values[n] for n in node.all_input_nodes}
        large = [v for v in values.values() if getattr(v, "ndim", 0)]
        first = next((v for v in large if isinstance(v, Flat)), None)
        if first is not None and all(tuple(v.shape) == shape for v in large):
            order = first.order
            return (
                lambda n: (
                    to_flat_array(values[n], order) if getattr(values[n], "ndim", 0) else values[n]
                ),
                lambda result: Flat(result, shape, order),
            )
        if any(isinstance(v, ChannelsLast) and v.ndim == len(shape) for v in large):
            return lambda n: self._read_channels_last(n, len(shape)), ChannelsLast
        return self._read_logical, lambda result: result

    def _read_channels_last(self, node: fx.Node, ndim: int) -> Any:
        """An operand as it is broadcast to `ndim` dimensions that are stored channels last."""
        value = self._values[node]
        if isinstance(value, ChannelsLast) and value.ndim == ndim:
            return value.array
        value = self._read_logical(node)
        if not isinstance(value, jax.Array) or value.ndim == 0:
            return value
        return channels_last(value.reshape((1,) * (ndim - value.ndim) + value.shape))

    def _read_raw(self, node: fx.Node) -> Any:
        """Returns what lowerings get that deal with `ChannelsLast` values themselves."""
        value = self._values[node]
        return self._read_logical(node) if isinstance(value, Flat) else value

    def _read_logical(self, node: fx.Node) -> Any:
        value = self._values[node]
        if not isinstance(value, ChannelsLast | Flat):
            return value
        if node not in self._logical:
            self._logical[node] = to_logical_array(value)
        return self._logical[node]


def conform(result: Any, expected: Any) -> Any:
    """Casts a lowered result to the fake tensor's dtype; raises if the shape differs."""
    if result is None:
        return None  # a gradient that nobody asked for; torch's meta kernels make one
    if isinstance(expected, torch.Tensor):
        shape = tuple(result.shape)
        if shape != tuple(expected.shape):
            raise ValueError(
                f"its lowering has shape {shape}, but torch expects {tuple(expected.shape)}"
            )
        dtype = to_jax(expected.dtype)
        if isinstance(result, ChannelsLast | Flat):
            return replace(result, array=result.array.astype(dtype))
        return jnp.asarray(result).astype(dtype)
    if isinstance(expected, list | tuple):
        return tuple(conform(r, e) for r, e in zip(result, expected, strict=True))
    return result


_SUMS = frozenset({"add", "sub", "rsub"})
_PRODUCTS = frozenset({"mul", "div", "reciprocal"})
_FUNCTIONS = frozenset(
    {"exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "pow", "rsqrt", "sqrt"}
)
_CONTRACTIONS = frozenset({"addmm", "baddbmm", "bmm", "convolution", "dot", "mm", "mv"})
_CONSTANTS = frozenset({"full", "full_like", "ones", "ones_like", "scalar_tensor"})


def find_barrier_nodes(graph: fx.Graph) -> frozenset[fx.Node]:
    """Returns the nodes whose results need an optimization barrier."""
    return frozenset(source for node in graph.nodes for source in _hidden_from(node))


def add_optimization_barrier(value: Any) -> Any:
    """Puts `lax.optimization_barrier` on a value, so that XLA cannot simplify it."""
    if isinstance(value, ChannelsLast | Flat):
        return replace(value, array=lax.optimization_barrier(value.array))
    return lax.optimization_barrier(value)


def _hidden_from(node: fx.Node) -> Iterator[fx.Node]:
    """Returns which calls that a call reads it must not be simplified with."""
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

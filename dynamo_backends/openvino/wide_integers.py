"""64-bit integers as pairs of 32-bit ones, unless their values are known to fit into 32 bits.

Calls on integers that are not known to fit into 32 bits become calls on both halves (`pairs.py`).
Inputs of the model are then the same memory as int32 with one more dimension, of size 2, and so
are outputs.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.graph.call_arguments import collect_tensors
from dynamo_backends.graph.call_decomposition import insert_traced_calls
from dynamo_backends.graph.call_tracing import CallTraceCache
from dynamo_backends.graph.constant_evaluation import evaluate_constant
from dynamo_backends.graph.symbolic_sizes import SIZES, has_size_expressions, sizes_of
from dynamo_backends.graph.value_ranges import IntegerRangeAnalysis
from dynamo_backends.interface.errors import LoweringError
from dynamo_backends.openvino.int64_pairs import RULES, Int64Pair

aten = torch.ops.aten

_POSITIONS: Mapping[OpOverload, tuple[int, ...]] = {
    aten.gather.default: (2,),
    aten.index.Tensor: (1,),
    aten._unsafe_index.Tensor: (1,),
    aten.index_select.default: (2,),
    aten.embedding.default: (1,),
    aten.scatter.src: (2,),
    aten.scatter.value: (2,),
    aten.scatter_add.default: (2,),
    aten.index_add.default: (2,),
    aten.index_put.default: (1,),
}
"""Which operands are positions: where eager takes them, they fit into 32 bits."""

_ACCUMULATING = (
    aten.cumsum.default, aten.prod.default, aten.prod.dim_int, aten.sum.default,
    aten.sum.dim_IntList,
)  # fmt: skip
"""Operators whose results are 64-bit integers for narrower operands."""


def needs_int64_pairs(node: fx.Node) -> bool:
    """Returns whether a call's 64-bit integers may exceed 32 bits, and a pair rule exists."""
    if node.op != "call_function" or node.target not in RULES:
        return False
    read = _operands(node)
    if any(map(has_int64, read)):
        return not fits_in_int32(node)
    is_sum = node.target in _ACCUMULATING and has_int64(node)
    return is_sum and not any(_is_float(x) for x in read) and not fits_in_int32(node)


def _is_float(node: fx.Node) -> bool:
    return bool(node.meta["val"].is_floating_point())


def _operands(node: fx.Node) -> list[fx.Node]:
    """Returns the nodes that a call reads, without index operands."""
    positions = _POSITIONS.get(node.target, ())  # type: ignore[call-overload]
    values = [x for i, x in enumerate(node.args) if i not in positions]
    return [x for x in pytree.tree_leaves((values, node.kwargs)) if isinstance(x, fx.Node)]


def split_int64_calls(
    module: fx.GraphModule, wide: Collection[fx.Node]
) -> tuple[frozenset[str], list[bool], list[fx.Node]]:
    """Rewrites calls on wide 64-bit integers to calls on int32 pairs, in place.

    Args:
        module: Its inputs and outputs are row-major (see `legalize.store`).
        wide: The calls (see `needs_int64_pairs`), those included that bring inputs and outputs into
            order.

    Returns:
        The names of the inputs that are pairs now, for each output whether it is, and new calls.

    Raises:
        LoweringError: A call reads pairs for which there is no rule.
    """
    graph = module.graph
    before = set(graph.nodes)
    split = _Splitter(graph, wide)
    for node in [node for node in graph.nodes if node in wide]:
        split.rewrite(node)
    outputs = split.join_outputs()
    if wide:
        graph.eliminate_dead_code()
    return frozenset(split.inputs), outputs, [n for n in graph.nodes if n not in before]


@functools.cache
def _rule(target: Any) -> Callable[..., Any]:
    """Returns a pair rule with plain tuples as results, as graphs have them."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = RULES[target](*args, **kwargs)
        if isinstance(result, Tensor | Int64Pair):
            return result if isinstance(result, Tensor) else tuple(result)
        return tuple(tuple(x) if isinstance(x, Int64Pair) else x for x in result)

    return call


class _Splitter:
    def __init__(self, graph: fx.Graph, wide: Collection[fx.Node]):
        self.graph = graph
        self.inputs: set[str] = set()
        self._traces = CallTraceCache()
        self._pairs: dict[fx.Node, Any] = {}
        self._widened: dict[fx.Node, Any] = {}
        self._narrow = {node for node in graph.nodes if node not in wide and fits_in_int32(node)}
        read = {x for node in wide for x in _operands(node)}
        for place in graph.find_nodes(op="placeholder"):
            if place in read and has_int64(place):
                self._split_input(place)

    def _split_input(self, place: fx.Node) -> None:
        first = next(n for n in self.graph.nodes if n.op != "placeholder")
        value, users = place.meta["val"], list(place.users)
        with self.graph.inserting_before(first):
            halves: Any = Int64Pair(*(self._call(aten.select.int, place, -1, i) for i in (0, 1)))
            for half in halves:
                half.meta = {**place.meta, "val": value.new_empty(value.shape, dtype=torch.int32)}
            narrow = self._narrowed(halves, place)
        place.meta = {**place.meta, "val": value.new_empty((*value.shape, 2), dtype=torch.int32)}
        if SIZES in place.meta:
            place.meta[SIZES] = (*place.meta[SIZES], 2)
        for user in users:
            user.replace_input_with(place, narrow)
        self._pairs[narrow] = halves
        self.inputs.add(place.name)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        return self.graph.call_function(target, args, kwargs)

    def _narrowed(self, pair: Any, node: fx.Node) -> fx.Node:
        """Converts a pair's lower half to int64, for readers of small integers."""
        narrow: fx.Node = self._call(aten._to_copy.default, pair.low, dtype=torch.int64)
        narrow.meta = {**pair.low.meta, "val": node.meta["val"]}
        return narrow

    def rewrite(self, node: fx.Node) -> None:
        """Replaces a call by what its rule makes of it."""
        target: Any = node.target
        positions = _POSITIONS.get(target, ())
        if has_size_expressions(self.graph) and any(
            None in sizes_of(n) for n in (node, *_operands(node))
        ):
            raise LoweringError(
                node.name, str(target), "64-bit integers of unknown size are not supported"
            )
        with self.graph.inserting_before(node):
            args = [
                x if i in positions else fx.map_arg(x, self._widen) for i, x in enumerate(node.args)
            ]
            call = self._call(target, *args, **fx.map_arg(node.kwargs, self._widen))
            call.meta = dict(node.meta)
        results = insert_traced_calls(call, _rule(target), traces=self._traces)
        self.graph.erase_node(call)
        with self.graph.inserting_before(node):
            if isinstance(node.meta["val"], Tensor):
                self._put(node, results)
                return
            for user in list(node.users):
                self._put(user, results[user.args[1]])
            self.graph.erase_node(node)

    def _widen(self, node: fx.Node) -> Any:
        """Returns the pair for an int64 node; sign-extends it if it has none."""
        if node in self._pairs or not has_int64(node):
            return self._pairs.get(node, node)
        if node not in self._widened:
            low = self._call(aten._to_copy.default, node, dtype=torch.int32)
            high = self._call(aten.__rshift__.Scalar, low, 31)
            for half in (low, high):
                value = node.meta["val"]
                half.meta = {**node.meta, "val": value.new_empty(value.shape, dtype=torch.int32)}
            self._widened[node] = Int64Pair(low, high)
        return self._widened[node]

    def _put(self, node: fx.Node, result: Any) -> None:
        if not isinstance(result, fx.Node):
            pair = Int64Pair(*result)
            result = self._narrowed(pair, node)
            self._pairs[result] = pair
        node.replace_all_uses_with(result)
        self.graph.erase_node(node)

    def join_outputs(self) -> list[bool]:
        """Makes pairs of outputs that are known as such; says which ones."""
        output = self.graph.output_node()
        results: Any = output.args[0]
        joined = []
        with self.graph.inserting_before(output):
            for node in results:
                pair = self._pairs.get(node)
                joined.append(node if pair is None else self._joined(pair))
        output.args = (tuple(joined),)
        self._check_readers()
        return [node in self._pairs for node in results]

    def _joined(self, pair: Any) -> fx.Node:
        value = pair.low.meta["val"]
        joined: fx.Node = self._call(aten.stack.default, [pair.low, pair.high], -1)
        joined.meta["val"] = value.new_empty((*value.shape, 2))
        if SIZES in pair.low.meta:
            joined.meta[SIZES] = (*pair.low.meta[SIZES], 2)
        return joined

    def _check_readers(self) -> None:
        """Raises if a call reads of a pair the lower half alone, and not as positions."""
        for narrow in self._pairs:
            for user in narrow.users:
                if user not in self._narrow and narrow in _operands(user):
                    reason = (
                        "it uses 64-bit integers that this backend represents as pairs of 32-bit "
                        "integers"
                    )
                    raise LoweringError(user.name, str(user.target), reason)


@dataclass(frozen=True)
class KnownIntegers:
    """Known values or ranges of a call's 64-bit inputs, all within 32 bits.

    Attributes:
        values: Of all inputs, if they are known.
        ranges: Else the least and the largest number of each input; None for other types.
    """

    values: tuple[Tensor, ...] = ()
    ranges: tuple[tuple[int, int] | None, ...] = ()


UNKNOWN = KnownIntegers()


def has_int64(node: fx.Node) -> bool:
    """Returns whether a node's value, or one of its results, is an int64 tensor."""
    return any(value.dtype == torch.int64 for value in collect_tensors(node.meta.get("val")))


def find_known_inputs(node: fx.Node) -> KnownIntegers:
    """Returns the known values or ranges of a call's inputs; `UNKNOWN` if some are not."""
    if not any(map(has_int64, node.all_input_nodes)):
        return UNKNOWN
    values = [evaluate_constant(n) for n in (*node.all_input_nodes, node)]
    if all(map(_is_small, values)):
        return KnownIntegers(values=tuple(v for v in values[:-1] if v is not None))
    ranges = IntegerRangeAnalysis()
    if not _are_within(ranges, node):
        return UNKNOWN
    return KnownIntegers(
        ranges=tuple(ranges.range_of(n) if has_int64(n) else None for n in node.all_input_nodes)
    )


def fits_in_int32(node: fx.Node) -> bool:
    """Returns whether all 64-bit integers that a call reads and returns fit 32 bits."""
    return find_known_inputs(node) != UNKNOWN or _are_within(IntegerRangeAnalysis(), node)


_READ_SHAPES_ALONE = frozenset(
    {
        aten.empty_like.default, aten.full_like.default, aten.new_empty.default,
        aten.new_full.default, aten.new_ones.default, aten.new_zeros.default,
        aten.ones_like.default, aten.zeros_like.default,
    }
)  # fmt: skip
"""Operators for which the values of the tensor that they read do not matter."""


def _are_within(ranges: IntegerRangeAnalysis, node: fx.Node) -> bool:
    read = () if node.target in _READ_SHAPES_ALONE else node.all_input_nodes
    longs = [n for n in (*read, node) if has_int64(n)]
    return all(_is_within(ranges.range_of(n)) for n in longs)


def _is_within(found: Any) -> bool:
    """Returns whether a range is known and fits into 32 bits."""
    return found is not None and all(isinstance(n, int) and abs(n) < 1 << 31 for n in found)


def _is_small(value: Tensor | None) -> bool:
    if value is None or value.dtype != torch.int64 or not value.numel():
        return value is not None
    bounds = torch.iinfo(torch.int32)
    return bool(value.min() >= bounds.min and value.max() <= bounds.max)

"""Infers ranges of the integers in tensors from the graph alone.

Positions from `arange`, `argmax`, `topk`, comparisons and arithmetic on them are known to lie
within a tensor. Bounds are integers or expressions over the symbols of sizes.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import OpOverload, disable_current_modes

aten, prims = torch.ops.aten, torch.ops.prims

Bound = Any
"""An `int`, or a sympy expression."""
Range = tuple[Bound, Bound]
"""The least and the largest value, both included."""

_LARGE = 1 << 22  # elements of constants whose values are looked at


def to_bound(size: Any) -> Bound:
    """Converts a size or number to an int or expression; None if it is neither."""
    if isinstance(size, torch.SymInt):
        expression = sympy.sympify(size.node.expr)
        return int(expression) if expression.is_Integer else expression
    return int(size) if isinstance(size, int) else None


def is_never_above(a: Bound, b: Bound) -> bool:
    """Returns whether one bound is at most another for all values of the symbols."""
    if isinstance(a, int) and isinstance(b, int):
        return a <= b
    return bool(sympy.expand(b - a).is_nonnegative)


class IntegerRangeAnalysis:
    """Infers, on demand, ranges of the integers in a graph's tensors.

    Args:
        known: Ranges of some nodes; all others follow from them.
    """

    def __init__(self, known: Mapping[fx.Node, Range] | None = None):
        self._known: dict[fx.Node, Range | None] = dict(known or {})

    def set_range(self, node: fx.Node, found: Range) -> None:
        """Sets the range of a node's values, once they were checked."""
        self._known[node] = found

    def range_of(self, node: Any) -> Range | None:
        """Infers the range of a node's values or of a number; None if unknown."""
        if not isinstance(node, fx.Node):
            bound = to_bound(node)
            return None if bound is None else (bound, bound)
        if node not in self._known:
            self._known[node] = None  # while its arguments are looked at
            self._known[node] = self._within_dtype(node, self._computed(node))
        return self._known[node]

    def _computed(self, node: fx.Node) -> Range | None:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            bound = to_bound(value)
            return None if bound is None else (bound, bound)
        if value.dtype == torch.bool:
            decided = _DECIDED.get(node.target)  # type: ignore[call-overload]
            return (0, 1) if decided is None else decided(self, node)
        if value.dtype.is_floating_point or value.dtype.is_complex or node.op != "call_function":
            return None
        if node.target is operator.getitem:
            return self._of_result(node)
        rule = _RULES.get(node.target)  # type: ignore[call-overload]
        try:
            return None if rule is None else rule(self, node)
        except (TypeError, IndexError, ValueError):  # arguments of another form
            return None

    def _of_result(self, node: fx.Node) -> Range | None:
        source: Any = node.args[0]
        if (source.target, node.args[1]) in _POSITIONS_OF:
            return _positions_in(source)
        is_part = source.target in _PARTS or (source.target, 1) in _POSITIONS_OF
        return self.range_of(source.args[0]) if is_part else None

    def _within_dtype(self, node: fx.Node, found: Range | None) -> Range | None:
        """A range that arithmetic has not left; what a narrow dtype says where there is none."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.dtype.is_floating_point:
            return found
        if value.dtype.is_complex or value.dtype == torch.bool:
            return found
        limits = torch.iinfo(value.dtype)
        if found is not None and all(_fits(x, limits) for x in found):
            return found
        return (limits.min, limits.max) if limits.bits <= 16 else None


def range_of_constant(value: Tensor) -> Range | None:
    """Returns the (least, largest) value of an integer CPU tensor; None if it is too large."""
    if value.dtype.is_floating_point or value.dtype.is_complex or value.device.type != "cpu":
        return None
    if not 0 < value.numel() <= _LARGE:
        return None
    with disable_current_modes():
        least, most = torch.aminmax(value.detach())
        return int(least), int(most)


def _fits(bound: Bound, limits: torch.iinfo) -> bool:
    if isinstance(bound, int):
        return limits.min <= bound <= limits.max
    return limits.bits == 64  # sizes, and sums of a few, are far from the limits


_Rule = Callable[[IntegerRangeAnalysis, fx.Node], Range | None]


def _same(place: int = 0) -> _Rule:
    return lambda ranges, node: ranges.range_of(node.args[place])


def _union(parts: Iterable[Range | None]) -> Range | None:
    every = list(parts)
    found = [x for x in every if x is not None]
    if not found or len(found) < len(every):
        return None
    least, most = found[0]
    for low, high in found[1:]:
        if not is_never_above(least, low):
            if not is_never_above(low, least):
                return None
            least = low
        if not is_never_above(high, most):
            if not is_never_above(most, high):
                return None
            most = high
    return least, most


def _hull(bounds: Sequence[Bound]) -> Range | None:
    return _union((b, b) for b in bounds)


def _arange(ranges: IntegerRangeAnalysis, node: fx.Node) -> Range | None:
    args = [x[0] for x in map(ranges.range_of, node.args) if x is not None and x[0] == x[1]]
    if len(args) < len(node.args):
        return None
    first, last, by = [0, *args, 1] if len(args) == 1 else [*args, 1][:3]
    if by != 1:
        if not isinstance(by, int) or not all(isinstance(x, int) for x in (first, last)):
            return None
        steps = range(first, last, by)
        return (min(steps[0], steps[-1]), max(steps[0], steps[-1])) if steps else (0, 0)
    return first, last - 1


def _iota(ranges: IntegerRangeAnalysis, node: fx.Node) -> Range | None:
    length = ranges.range_of(node.args[0])
    start, step = node.kwargs.get("start", 0), node.kwargs.get("step", 1)
    if length is None or not isinstance(start, int) or not isinstance(step, int):
        return None
    return _hull([start, start + step * (length[1] - 1)])


def _filled(ranges: IntegerRangeAnalysis, node: fx.Node) -> Range | None:
    return ranges.range_of(node.args[1])


def _added(sign: int) -> _Rule:
    def rule(ranges: IntegerRangeAnalysis, node: fx.Node) -> Range | None:
        a, b = ranges.range_of(node.args[0]), ranges.range_of(node.args[1])
        by = ranges.range_of(node.kwargs.get("alpha", 1))
        if a is None or b is None or by is None or not isinstance(by[0], int):
            return None
        factor = sign * by[0]
        low, high = (b[0], b[1]) if factor >= 0 else (b[1], b[0])
        return a[0] + factor * low, a[1] + factor * high

    return rule


def _multiplied(ranges: IntegerRangeAnalysis, node: fx.Node) -> Range | None:
    a, b = ranges.range_of(node.args[0]), ranges.range_of(node.args[1])
    if a is None or b is None:
        return None
    if is_never_above(0, a[0]) and is_never_above(0, b[0]):
        return a[0] * b[0], a[1] * b[1]
    return _hull([x * y for x in a for y in b])


def _negated(ranges: IntegerRangeAnalysis, node: fx.Node) -> Range | None:
    a = ranges.range_of(node.args[0])
    return None if a is None else (-a[1], -a[0])


def _clamped(least: Any, most: Any, found: Range | None) -> Range | None:
    """The range of a clamp whose bounds are ranges; None: there is none."""
    if least is None and most is None:
        return found
    low = None if found is None else found[0]
    high = None if found is None else found[1]
    if least is not None:
        low = least[0] if low is None or is_never_above(low, least[0]) else low
        if high is not None and not is_never_above(least[1], high):
            high = least[1] if is_never_above(high, least[1]) else None
    if most is not None:
        high = most[1] if high is None or is_never_above(most[1], high) else high
        if low is not None and not is_never_above(low, most[0]):
            low = most[0] if is_never_above(most[0], low) else None
    return None if low is None or high is None else (low, high)


def _clamp(low: int | None, high: int | None) -> _Rule:
    def rule(ranges: IntegerRangeAnalysis, node: fx.Node) -> Range | None:
        def bound(place: int | None, name: str) -> Range | None:
            given = node.kwargs.get(name)
            if place is not None and place < len(node.args):
                given = node.args[place]
            return None if given is None else ranges.range_of(given)

        return _clamped(bound(low, "min"), bound(high, "max"), ranges.range_of(node.args[0]))

    return rule


def _extreme(is_most: bool) -> _Rule:
    def rule(ranges: IntegerRangeAnalysis, node: fx.Node) -> Range | None:
        a, b = ranges.range_of(node.args[0]), ranges.range_of(node.args[1])
        if a is None or b is None:
            return None
        return _clamped(b, None, a) if is_most else _clamped(None, b, a)

    return rule


def _remainder(ranges: IntegerRangeAnalysis, node: fx.Node) -> Range | None:
    by = ranges.range_of(node.args[1])
    return None if by is None or not is_never_above(1, by[0]) else (0, by[1] - 1)


def _floored(ranges: IntegerRangeAnalysis, node: fx.Node) -> Range | None:
    a, by = ranges.range_of(node.args[0]), node.args[1]
    if a is None or not isinstance(by, int) or by <= 0 or not all(isinstance(x, int) for x in a):
        return None
    if node.target is aten.div.Tensor_mode and node.kwargs.get("rounding_mode") != "floor":
        return None if a[0] < 0 else (a[0] // by, a[1] // by)
    return a[0] // by, a[1] // by


def _masked(ranges: IntegerRangeAnalysis, node: fx.Node) -> Range | None:
    a, b = ranges.range_of(node.args[0]), ranges.range_of(node.args[1])
    sides = [x[1] for x in (a, b) if x is not None and is_never_above(0, x[0])]
    return (0, sides[0]) if sides else None


def _where(ranges: IntegerRangeAnalysis, node: fx.Node) -> Range | None:
    return _union([ranges.range_of(node.args[1]), ranges.range_of(node.args[2])])


def _either(place: int) -> _Rule:
    """Of operators that write an argument over parts of the first one."""
    return lambda ranges, node: _union(
        [ranges.range_of(node.args[0]), ranges.range_of(node.args[place])]
    )


def _put(ranges: IntegerRangeAnalysis, node: fx.Node) -> Range | None:
    return None if len(node.args) > 3 and node.args[3] else _either(2)(ranges, node)


def _joined(ranges: IntegerRangeAnalysis, node: fx.Node) -> Range | None:
    return _union(ranges.range_of(x) for x in node.args[0])  # type: ignore[union-attr]


def _padded(ranges: IntegerRangeAnalysis, node: fx.Node) -> Range | None:
    value = node.args[2] if len(node.args) > 2 else 0
    return _union([ranges.range_of(node.args[0]), ranges.range_of(value)])


def _summed(ranges: IntegerRangeAnalysis, node: fx.Node) -> Range | None:
    a, source = ranges.range_of(node.args[0]), node.args[0].meta["val"]  # type: ignore[union-attr]
    dims: Any = node.args[1] if len(node.args) > 1 else None
    if a is None:
        return None
    count: Bound = 1
    for dim in range(source.ndim) if dims in (None, []) else _listed(dims):
        count = count * to_bound(source.shape[dim])
    return _union([(0, 0), (a[0] * count, a[0] * count), (a[1] * count, a[1] * count), a])


def _listed(dims: Any) -> Sequence[int]:
    return dims if isinstance(dims, list | tuple) else [dims]


def _positions_in(node: Any) -> Range | None:
    """Of operators that say where in a dimension of their first argument something is."""
    shape, target = node.args[0].meta["val"].shape, node.target
    if target in _OF_PLANES:
        sizes: Sequence[Any] = shape[-_OF_PLANES[target] :]
    elif target in (aten.argmax.default, aten.argmin.default) and (
        len(node.args) < 2 or node.args[1] is None
    ):
        sizes = shape
    else:
        place, default = _DIM_OF.get(target, (1, -1))
        dim = node.args[place] if len(node.args) > place else node.kwargs.get("dim", default)
        sizes = (shape[dim],) if shape else ()
    count: Bound = 1
    for size in sizes:
        count = count * to_bound(size)
    return 0, count - 1


def _drawn(ranges: IntegerRangeAnalysis, node: fx.Node) -> Range | None:
    args = [x for x in node.args if isinstance(x, int)]
    return (0, args[0] - 1) if len(args) == 1 else (args[0], args[1] - 1)


def _compared(is_true: Callable[[Range, Range], bool]) -> _Rule:
    """Of comparisons: (1, 1) where the ranges show that all of them hold."""

    def rule(ranges: IntegerRangeAnalysis, node: fx.Node) -> Range | None:
        a, b = ranges.range_of(node.args[0]), ranges.range_of(node.args[1])
        holds = a is not None and b is not None and is_true(a, b)
        return int(holds), 1

    return rule


def _both(ranges: IntegerRangeAnalysis, node: fx.Node) -> Range | None:
    a, b = ranges.range_of(node.args[0]), ranges.range_of(node.args[1])
    return int(a == b == (1, 1)), 1


def _negation(ranges: IntegerRangeAnalysis, node: fx.Node) -> Range | None:
    found = ranges.range_of(node.args[0])
    return {(1, 1): (0, 0), (0, 0): (1, 1)}.get(found or (0, 1), (0, 1))


def _reduced(ranges: IntegerRangeAnalysis, node: fx.Node) -> Range | None:
    """Of `all` and `any` of something: what all of it is."""
    source: Any = node.args[0]
    found = ranges.range_of(source) if source.meta["val"].dtype == torch.bool else None
    return found or (0, 1)


_DECIDED: dict[OpOverload, _Rule] = {
    aten.ge.Scalar: _compared(lambda a, b: is_never_above(b[1], a[0])),
    aten.le.Scalar: _compared(lambda a, b: is_never_above(a[1], b[0])),
    aten.gt.Scalar: _compared(lambda a, b: is_never_above(b[1] + 1, a[0])),
    aten.lt.Scalar: _compared(lambda a, b: is_never_above(a[1] + 1, b[0])),
    aten.bitwise_and.Tensor: _both,
    aten.logical_and.default: _both,
    aten.logical_not.default: _negation,
    aten.bitwise_not.default: _negation,
    **dict.fromkeys((aten.all.default, aten.all.dim, aten.all.dims), _reduced),
    **dict.fromkeys((aten.any.default, aten.any.dim, aten.any.dims), _reduced),
}
"""What is known of results that are true or false."""

_DIM_OF = {
    aten.topk.default: (2, -1),
    aten.kthvalue.default: (2, -1),
    aten.sort.stable: (2, -1),
    aten.argsort.stable: (2, -1),
}
_OF_PLANES = {
    aten.max_pool2d_with_indices.default: 2,
    aten.max_pool3d_with_indices.default: 3,
    aten.adaptive_max_pool2d.default: 2,
    aten.adaptive_max_pool3d.default: 3,
    aten.fractional_max_pool2d.default: 2,
    aten.fractional_max_pool3d.default: 3,
}
_POSITIONS_OF = frozenset(
    (op, 1)
    for op in (
        *_OF_PLANES, aten.max.dim, aten.min.dim, aten.topk.default, aten.sort.default,
        aten.sort.stable, aten.kthvalue.default, aten.mode.default, aten.median.dim,
        aten.nanmedian.dim, aten.cummax.default, aten.cummin.default,
    )
)  # fmt: skip

_PARTS = frozenset({aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int})
"""Operators whose results are made of the values of their first argument."""

_RULES: dict[OpOverload, _Rule] = {
    **dict.fromkeys(
        (
            aten.alias.default,
            aten.view.default,
            aten._unsafe_view.default,
            aten.expand.default,
            aten.permute.default,
            aten.t.default,
            aten.transpose.int,
            aten.slice.Tensor,
            aten.select.int,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.unsqueeze.default,
            aten.reshape.default,
            aten.clone.default,
            aten.flip.default,
            aten.roll.default,
            aten.repeat.default,
            aten._to_copy.default,
            aten.detach.default,
            aten.lift_fresh_copy.default,
            aten.as_strided.default,
            aten.index.Tensor,
            aten._unsafe_index.Tensor,
            aten.diagonal.default,
            aten.unfold.default,
            aten.gather.default,
            aten.index_select.default,
            aten.embedding.default,
            aten.take.default,
            aten.amax.default,
            aten.amin.default,
        ),
        _same(),
    ),
    prims.convert_element_type.default: _same(),
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    prims.iota.default: _iota,
    aten.full.default: _filled,
    aten.full_like.default: _filled,
    aten.new_full.default: lambda ranges, node: ranges.range_of(node.args[2]),
    aten.scalar_tensor.default: _same(),
    aten.fill.Scalar: _filled,
    **dict.fromkeys(
        (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), lambda *_: (0, 0)
    ),
    **dict.fromkeys(
        (aten.ones.default, aten.ones_like.default, aten.new_ones.default), lambda *_: (1, 1)
    ),
    aten.add.Tensor: _added(1),
    aten.add.Scalar: _added(1),
    aten.sub.Tensor: _added(-1),
    aten.sub.Scalar: _added(-1),
    aten.mul.Tensor: _multiplied,
    aten.mul.Scalar: _multiplied,
    aten.neg.default: _negated,
    aten.clamp.default: _clamp(1, 2),
    aten.clamp.Tensor: _clamp(1, 2),
    aten.clamp_min.default: _clamp(1, None),
    aten.clamp_max.default: _clamp(None, 1),
    aten.maximum.default: _extreme(True),
    aten.minimum.default: _extreme(False),
    aten.remainder.Scalar: _remainder,
    aten.remainder.Tensor: _remainder,
    aten.div.Tensor_mode: _floored,
    aten.floor_divide.default: _floored,
    aten.bitwise_and.Scalar: _masked,
    aten.bitwise_and.Tensor: _masked,
    aten.where.self: _where,
    aten.masked_fill.Scalar: _either(2),
    aten.masked_fill.Tensor: _either(2),
    aten.index_put.default: _put,
    aten.scatter.src: _either(3),
    aten.scatter.value: _either(3),
    aten.slice_scatter.default: _either(1),
    aten.select_scatter.default: _either(1),
    aten.cat.default: _joined,
    aten.stack.default: _joined,
    aten.constant_pad_nd.default: _padded,
    aten.cumsum.default: _summed,
    aten.sum.default: _summed,
    aten.sum.dim_IntList: _summed,
    aten.argmax.default: lambda _, node: _positions_in(node),
    aten.argmin.default: lambda _, node: _positions_in(node),
    aten.argsort.default: lambda _, node: _positions_in(node),
    aten.argsort.stable: lambda _, node: _positions_in(node),
    aten.randint.default: _drawn,
    aten.randint.low: _drawn,
    aten.randperm.default: _drawn,
}

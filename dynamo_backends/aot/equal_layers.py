"""Finds equal layers in a captured graph, so that AOT Autograd traces one for all.

Layers are equal if their calls are, in order: the same targets and arguments, results of the same
shapes, strides and dtypes, and operands that are results of corresponding calls, or come from
outside of the layer and have the same shapes, strides and dtypes.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends.aot.inputs import written_operands

LEAST_CALLS = 8
"""Of a layer; to trace fewer calls takes less time than to look for them."""

LEAST_LAYERS = 4
"""AOT Autograd takes as long for a region as for three layers."""

_PERIODS = 4
"""So many distances between equal calls are tried, the most frequent ones first."""

_STARTS = 16
"""So many calls are tried as the first one of a layer."""

Layers = Sequence[Sequence[fx.Node]]


def mark_equal_layers(captured: fx.GraphModule) -> fx.GraphModule:
    """Returns a graph of Dynamo's in which equal layers are calls of one region.

    Args:
        captured: The graph, with static sizes; it is not changed.

    Returns:
        A copy; the graph itself if it has no layers that a region can stand for.
    """
    calls = [node for node in captured.graph.nodes if node.op not in ("placeholder", "output")]
    kinds = [_kind(node) for node in calls]
    for layers in _repeated(calls, kinds):
        marked = _marked(captured, layers)
        if marked is not None:
            return marked
    return captured


_PRODUCTS = frozenset({"linear", "matmul"})
_ATTENTION = "multi_head_attention_forward"  # calls both


def depends_on_gradients(captured: fx.GraphModule) -> bool:
    """Returns whether what torch traces depends on whether weights require gradients.

    It folds products of a weight with a tensor of gaps if the weight does, and batches them if not.
    In a region no tensor does.
    """
    return any(map(_is_folded, captured.graph.nodes))


def _is_folded(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", node.target)
    if name not in _PRODUCTS and name != _ATTENTION:
        return False
    values = [x.meta.get("example_value") for x in node.all_input_nodes]
    tensors = [x for x in values if isinstance(x, Tensor)]
    has_gaps = name == _ATTENTION or any(x.ndim > 2 and not x.is_contiguous() for x in tensors)
    return has_gaps and any(x.requires_grad for x in tensors)


def _kind(node: fx.Node) -> str:
    """What equal calls have in common, besides their operands."""
    arguments = fx.node.map_aggregate((node.args, node.kwargs), _without_operand)
    return f"{node.op} {id(node.target)} {arguments} {_description(node)}"


def _without_operand(argument: Any) -> Any:
    return ... if isinstance(argument, fx.Node) else argument


def _description(node: fx.Node) -> str:
    value = node.meta.get("example_value")
    values = value if isinstance(value, list | tuple) else (value,)
    static = node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
    return f"{static} {[_of_value(x) for x in values]}"


def _of_value(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    layout = tuple(value.shape), value.stride(), value.storage_offset()
    return f"{type(value).__name__} {value.dtype} {value.device} {layout} {value.requires_grad}"


def _repeated(calls: Sequence[fx.Node], kinds: Sequence[str]) -> Iterator[Layers]:
    """Yields runs of calls that repeat one after the other, by their kinds alone."""
    last: dict[str, int] = {}
    apart: Counter[int] = Counter()
    for i, kind in enumerate(kinds):
        apart[i - last.get(kind, i)] += 1
        last[kind] = i
    periods = [period for period, _ in apart.most_common() if period >= LEAST_CALLS]
    for period in periods[:_PERIODS]:
        first, length = _longest([a == b for a, b in zip(kinds, kinds[period:], strict=False)])
        count = length // period + 1
        shifts = min(length % period + 1, _STARTS) if count >= LEAST_LAYERS else 0
        for start in range(first, first + shifts):
            starts = range(start, start + count * period, period)
            yield [calls[i : i + period] for i in starts]


def _longest(flags: Sequence[bool]) -> tuple[int, int]:
    """Returns where the longest run of True begins, and its length."""
    best, begin = (0, 0), 0
    for i, flag in enumerate((*flags, False)):
        if not flag:
            best, begin = max(best, (begin, i - begin), key=lambda x: x[1]), i + 1
    return best


def _marked(captured: fx.GraphModule, layers: Layers) -> fx.GraphModule | None:
    """Returns the graph with calls of a region; None if the layers are not equal, or share memory.

    What a region returns may not share memory with what it is given, nor may it write to that: AOT
    Autograd would not see it.
    """
    # Without a value is what sets a mode, which may not end where it began.
    if any(written_operands(x) or "example_value" not in x.meta for x in layers[0]):
        return None
    numbers = [{node: i for i, node in enumerate(layer)} for layer in layers]
    operands: dict[tuple[fx.Node, ...], None] = {}
    for calls in zip(*layers, strict=True):
        for read in zip(*map(_operands, calls), strict=True):
            places = {known.get(node) for known, node in zip(numbers, read, strict=True)}
            if len(places) > 1 or (None in places and len(set(map(_description, read))) > 1):
                return None
            if None in places:
                operands[read] = None
    if len({read[0] for read in operands}) < len(operands):
        return None  # one value has several parts in the first layer, and not in others
    results = sorted({i for known in numbers for node, i in known.items() if _leaves(node, known)})
    for number, layer in enumerate(layers):
        given = [_memory(read[number]) for read in operands]
        returned = [_memory(layer[i]) for i in results]
        if None in returned or len({*returned}) < len(returned) or {*returned} & {*given}:
            return None
    return private.call_region(captured, layers, list(operands), results)


def _operands(node: fx.Node) -> list[fx.Node]:
    """Returns the nodes that a call reads, in order, one that it reads twice twice."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _leaves(node: fx.Node, layer: Mapping[fx.Node, int]) -> bool:
    return any(user not in layer for user in node.users)


def _memory(node: fx.Node) -> int | None:
    value = node.meta.get("example_value")
    return private.storage_id(value) if isinstance(value, Tensor) else None

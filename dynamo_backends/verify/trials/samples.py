"""Inputs for trials: what implementations of an operator tend to differ on.

Each call is run on several samples. The first ones hold usual numbers, and, where an operator works
element by element, halves, infinities, NaN, zeros of both signs, edges of domains, and numbers for
which `exp` and its relatives saturate. Further ones pair these with one another, put NaN and
infinities into rows that are reduced, repeat the largest element, have large means, put integers at
the bounds of their types, counts of shifts beyond their width, and positions at the end of each
dimension, counted from either side. So few elements never hold all of it; then there are more
samples.
"""

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends.graph.call_arguments import bind_arguments, is_pointwise
from dynamo_backends.graph.layouts import empty_strided_like

_NAN, _INF = float("nan"), float("inf")
_FLOATS = (0.0, -0.0, 0.5, 1.5, 2.5, -0.5, -1.5, 3.0, -3.0, 1e4, -1e4, 7.3, -7.3)
# Edges of domains; where float32 and float16 saturate; what float32's integers do not hold.
_HARD = (1.0, -1.0, 18.5, -18.5, 86.0, -86.0, 100.0, -100.0, 65520.0, 16777217.0, 1e-6, -1e-6,
         1e20, -1e20, 1e-20)  # fmt: skip
_MEAN = 1000.0
_SPECIAL = (_NAN, _INF, -_INF)
_KNOWN = (*_FLOATS, *_SPECIAL, *_HARD)
_PAIRED = (0.0, -0.0, 1.5, -1.5, *_SPECIAL)
_MOST_TURNS = 8  # of pairs, in tensors of a few elements

# What is special about a row, and where: at its start, in its middle, or at its end.
_ROWS: tuple[tuple[float, float | None], ...] = (
    (_NAN, 0.0),
    (_NAN, 0.5),
    (_NAN, 1.0),
    (_INF, 0.0),
    (-_INF, 1.0),
    (-_INF, None),
)

_FIRST = frozenset({"argmax", "argmin", "max", "min"})
"""Their indices are those of the first of several equal elements."""

_TIES_ARE_OPEN = frozenset({"kthvalue", "median", "mode", "nanmedian", "sort", "topk"})
"""Their indices are those of any of several equal elements."""

_BY_ROWS = frozenset((
    "_adaptive_avg_pool2d", "_log_softmax", "_softmax", "adaptive_max_pool2d",
    "adaptive_max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "bucketize", "cummax",
    "cummin", "cumprod", "cumsum", "fractional_max_pool2d", "fractional_max_pool3d", "kthvalue",
    "logcumsumexp", "max_pool2d_with_indices", "max_pool3d_with_indices", "mean",
    "native_group_norm", "native_layer_norm", "searchsorted", "sort", "topk",
))  # fmt: skip
"""Operators that reduce, order or search rows, and are not tagged as reductions."""

_MOVES = frozenset((
    "_to_copy", "cat", "clone", "constant_pad_nd", "copy", "embedding", "flip", "gather", "index",
    "index_select", "masked_select", "repeat", "roll", "stack", "tril", "triu",
))  # fmt: skip
"""Operators that only move elements, and are no views."""

_VARIANCES = frozenset({"std", "std_mean", "var", "var_mean"})
"""Operators that sum squares, which eager does in float64."""

_NORMS = frozenset({"_fused_rms_norm", "native_group_norm", "native_layer_norm", "rms_norm"})
"""Of rows whose squares overflow eager's results are 0 or NaN, depending on the length of a row."""

_OPEN_AT_INFINITY = frozenset({"std_mean", "var_mean"})
"""Their means of values with an infinity are that or NaN, depending on which value it is."""

# Arguments whose values are positions or sizes; anything else may hold any number.
_POSITIONS = frozenset((
    "boundaries", "index", "indices", "input_lengths", "lengths", "offsets", "repeats",
    "sorted_sequence", "target", "target_lengths", "targets",
))  # fmt: skip
_ASCENDING = frozenset({"boundaries", "offsets", "sorted_sequence"})
_COUNTS = frozenset({"bincount", "one_hot", "repeat_interleave"})
_SHIFTS = frozenset(
    {"__lshift__", "__rshift__", "bitwise_left_shift", "bitwise_right_shift"}
)  # whose second argument is a count of bits


def make_samples(node: fx.Node) -> Iterator[list[Tensor]]:
    """Yields a call's trial inputs: one tensor per node that it reads; deterministic.

    Args:
        node: The call, with fake tensors.
    """
    ordered, sizes = _named(node, _ASCENDING), _sizes_of_dimensions(node)
    alone = {positions for positions, size in sizes.items() if size == 1}
    for found in _all_samples(node):
        pairs = zip(node.all_input_nodes, _defined(node, found), strict=True)
        given = [_ascending(x) if source in ordered else x for source, x in pairs]
        for i, source in enumerate(node.all_input_nodes):
            if source in alone:
                given[i] = _stored_as(source.meta["val"], torch.zeros_like(given[i]))
        yield given


def _all_samples(node: fx.Node) -> Iterator[list[Tensor]]:
    values = [n.meta["val"] for n in node.all_input_nodes]
    for turn in range(sample_count(values)):
        yield make_sample(node.target, values, turn)
    floats = [i for i, v in enumerate(values) if v.dtype.is_floating_point and v.numel()]
    if is_pointwise(node.target):
        for places in (floats, _integers(node)):
            if len(places) > 1 and len({values[i].shape for i in places}) == 1:
                yield from _paired(node, values, places)
    elif floats and _keeps_rows_apart(node.target):
        yield from _special_rows(node, values, floats)
    if floats and not is_pointwise(node.target):
        yield from _hard_floats(node, values, floats)
    yield from _extreme(node, values)
    yield from _hard_positions(node, values)
    if _is_cast_to_integers(node):
        yield [_wide_floats(v, node.meta["val"].dtype) for v in values]


def without_nan(tensor: Tensor) -> Tensor:
    """Replaces each NaN in a trial's input by a number."""
    return torch.where(tensor.isnan(), 0.25, tensor) if tensor.is_floating_point() else tensor


def without_infinities(tensor: Tensor) -> Tensor:
    """Replaces each infinity in a trial's input by a number."""
    return torch.where(tensor.isinf(), 1.0, tensor) if tensor.is_floating_point() else tensor


def _ascending(tensor: Tensor) -> Tensor:
    """Sorts the elements; integers start at 0, as eager wants of offsets."""
    if not tensor.numel() or not tensor.ndim:
        return tensor
    line = tensor.sort().values
    return line - line.min() if _is_integer(tensor) else line


def _is_cast_to_integers(node: fx.Node) -> bool:
    """Returns whether a call casts floating-point numbers to integers."""
    if packet_name(node.target) != "_to_copy" or not _is_integer(node.meta["val"]):
        return False
    return all(n.meta["val"].dtype.is_floating_point for n in node.all_input_nodes)


def _defined(node: fx.Node, found: list[Tensor]) -> list[Tensor]:
    """Clamps a sample to numbers whose cast to an integer type is defined."""
    if not _is_cast_to_integers(node):
        return found
    least, most = _range(node.meta["val"].dtype)
    return [x.nan_to_num(0.25, 0.25, 0.25).clamp(least, most) for x in found]


def _range(dtype: torch.dtype) -> tuple[float, float]:
    """Powers of two between which a cast from any floating-point type is defined."""
    bits = torch.iinfo(dtype).bits
    return (-(2.0 ** (bits - 2)) if dtype.is_signed else 0.0), 2.0 ** (bits - 2)


def _wide_floats(fake: Tensor, target: torch.dtype) -> Tensor:
    """Numbers of every size that a cast to integers has a result for, the largest one first."""
    least, most = _range(target)
    count = fake.numel()
    line = torch.exp2(torch.linspace(0.99, 0.1, count, dtype=torch.float64) * math.log2(most))
    line = line * (1 - 2 * (torch.arange(count) % 2) * (least < 0))
    line = line.clamp(-torch.finfo(fake.dtype).max, torch.finfo(fake.dtype).max)
    return _stored_as(fake, line.to(fake.device, fake.dtype).view(fake.shape))


def sample_count(values: Sequence[Tensor]) -> int:
    """Returns how many samples show all usual numbers for inputs of these sizes."""
    largest = max((v.numel() for v in values), default=len(_KNOWN))
    return math.ceil(len(_KNOWN) / largest) if 0 < largest < len(_KNOWN) else 1


def make_sample(op: Any, values: Sequence[Tensor], turn: int = 0) -> list[Tensor]:
    """Makes the sample number `turn` of usual numbers for an operator's inputs.

    Operators that work element by element get integers of both signs, halves, infinities and NaN;
    others get numbers that are also valid as indices and as parts of a mask.

    Args:
        op: The operator.
        values: Fake inputs.
        turn: Which of the samples (see `sample_count`).
    """
    generator = torch.Generator().manual_seed(turn)
    floats, integers = _floats, _indices
    if is_pointwise(op):
        floats, integers = functools.partial(_known_floats, turn=turn), _signed_integers
    return [_tensor(v, floats, integers, generator) for v in values]


def packet_name(op: Any) -> str:
    """Returns an ATen operator's name without namespace and overload, such as "add"."""
    return str(getattr(op, "overloadpacket", op)).removeprefix("aten.")


def _keeps_rows_apart(op: Any) -> bool:
    """Returns whether a NaN in one row affects no other row of an operator's results."""
    tags = getattr(op, "tags", ())
    return (
        getattr(torch.Tag, "reduction", None) in tags
        or torch.Tag.view_copy in tags
        or packet_name(op) in _BY_ROWS | _MOVES
        or bool(getattr(op, "is_view", False))
    )


Line = Callable[[int, torch.Generator], Tensor]


def _tensor(fake: Tensor, floats: Line, integers: Line, generator: torch.Generator) -> Tensor:
    count = fake.numel()
    if fake.dtype == torch.bool:
        line = _indices(count, generator)
    elif fake.dtype.is_floating_point or fake.dtype.is_complex:
        line = floats(count, generator)
    else:
        line = integers(count, generator)
        line = line if fake.dtype.is_signed else line.abs()
    return _stored_as(fake, line.to(fake.device, fake.dtype).view(fake.shape))


def _stored_as(fake: Tensor, dense: Tensor) -> Tensor:
    """Copies elements into the fake tensor's strides; of overlapping ones the first."""
    if 0 not in fake.stride():
        return empty_strided_like(fake).copy_(dense)
    once = [slice(None if stride else 1) for stride in fake.stride()]
    apart = [
        1 if not stride else size for size, stride in zip(fake.shape, fake.stride(), strict=True)
    ]
    strides = [s or 1 for s in fake.stride()]
    memory = torch.empty_strided(apart, strides, dtype=fake.dtype, device=fake.device)
    return memory.copy_(dense[tuple(once)]).expand(fake.shape)


def _known_floats(count: int, generator: torch.Generator, turn: int) -> Tensor:
    line = torch.randn(count, generator=generator)
    known = torch.tensor(_KNOWN)
    if count < len(known):
        start = turn * count % len(known)
        return torch.cat([known, known])[start : start + count]
    places = torch.randperm(count, generator=generator)[: len(known)]
    line[places] = known
    return line


def _floats(count: int, generator: torch.Generator) -> Tensor:
    return torch.randn(count, generator=generator)


def _tied_floats(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(-2, 3, (count,), generator=generator)


def _signed_integers(count: int, generator: torch.Generator) -> Tensor:
    sign = torch.randint(0, 2, (count,), generator=generator) * 2 - 1
    return torch.randint(1, 8, (count,), generator=generator) * sign


def _indices(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (count,), generator=generator)


def _paired(
    node: fx.Node, values: Sequence[Tensor], places: Sequence[int]
) -> Iterator[list[Tensor]]:
    """Samples in which each of the numbers that are special meets each other one."""
    count = values[places[0]].numel()
    pairs = list(itertools.product(*(_to_be_paired(values[i].dtype) for i in places[:2])))
    for turn in range(min(_MOST_TURNS, math.ceil(len(pairs) / count))):
        found = make_sample(node.target, values)
        for order, place in enumerate(places):
            line = [pairs[(turn * count + i) % len(pairs)][order % 2] for i in range(count)]
            dense = torch.tensor(line).to(values[place].dtype).view(values[place].shape)
            found[place] = _stored_as(values[place], dense.to(values[place].device))
        yield found


def _to_be_paired(dtype: torch.dtype) -> tuple[float, ...]:
    if dtype.is_floating_point:
        return _PAIRED
    return (3, -3 if dtype.is_signed else 5, *extreme_integers(dtype))


def _special_rows(
    node: fx.Node, values: Sequence[Tensor], floats: Sequence[int]
) -> Iterator[list[Tensor]]:
    """Samples with NaN and infinities at all places of rows, and with several equal elements."""
    name = packet_name(node.target)
    kinds = _ROWS[:-1] if name in _TIES_ARE_OPEN else _ROWS
    if name in _OPEN_AT_INFINITY:
        kinds = tuple(kind for kind in _ROWS if math.isnan(kind[0]))
    fewest = min(values[i].numel() // _length(values[i]) for i in floats)
    for turn in range(math.ceil(len(kinds) / fewest)):
        found = make_sample(node.target, values)
        for place in floats:
            special = _with_special_rows(found[place], kinds, turn)
            found[place] = _stored_as(values[place], special)
        yield found
    last = make_sample(node.target, values)
    for place in floats:
        last[place] = _stored_as(values[place], _with_nan_at_the_end(last[place]))
    yield last
    if name in _FIRST:
        generator = torch.Generator().manual_seed(0)
        yield [_tensor(v, _tied_floats, _signed_integers, generator) for v in values]


def _hard_floats(
    node: fx.Node, values: Sequence[Tensor], floats: Sequence[int]
) -> Iterator[list[Tensor]]:
    """Samples with large means, and where rows are kept apart with numbers of all sizes in them."""
    found = make_sample(node.target, values)
    is_norm = "norm" in packet_name(node.target)  # large weights and biases cancel
    for place in floats[:1] if is_norm else floats:
        found[place] = _stored_as(values[place], found[place] + _MEAN)
    yield found
    if not _keeps_rows_apart(node.target):
        return
    found = make_sample(node.target, values)
    squares = packet_name(node.target) in _VARIANCES | _NORMS
    most = 1e18 if squares else float(torch.finfo().max)
    for place in floats:
        _write(found[place], [n for n in _KNOWN if abs(n) <= most], 0, every=3)
    yield found


def _length(value: Tensor) -> int:
    return value.shape[-1] if value.ndim else 1


def _with_special_rows(
    tensor: Tensor, kinds: Sequence[tuple[float, float | None]], turn: int
) -> Tensor:
    """Rows that hold one of the kinds of `_ROWS` each, at other places in other rows."""
    rows = tensor.clone(memory_format=torch.contiguous_format).view(-1, _length(tensor))
    count, length = rows.shape
    numbers = torch.arange(count)
    for kind, (special, start) in enumerate(kinds):
        chosen = numbers[(numbers + turn * count) % len(kinds) == kind]
        if start is None:
            rows[chosen] = special
        else:
            first = round(start * (length - 1))
            rows[chosen, (first - chosen // len(kinds)) % length] = special
    return rows.view(tensor.shape)


def _with_nan_at_the_end(tensor: Tensor) -> Tensor:
    line = tensor.clone(memory_format=torch.contiguous_format).view(-1)
    line[-1] = _NAN
    return line.view(tensor.shape)


def _extreme(node: fx.Node, values: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Samples with integers at the bounds of their types, in all inputs and in each one alone.

    So arithmetic that is done in another width shows, and what is only moved must arrive whole.
    Tensors that hold positions or sizes are left as they are.
    """
    places = _integers(node)
    chosen = [places, *([i] for i in places)] if len(places) > 1 else [places]
    if places and not is_pointwise(node.target):  # products of many, in which there is no 0
        generator = torch.Generator().manual_seed(0)
        found = make_sample(node.target, values)
        for place in places:
            found[place] = _tensor(values[place], _floats, _signed_integers, generator)
        yield found
    if packet_name(node.target) in _SHIFTS and len(places) > 1:
        yield _shifts(node, values, places)
        chosen = [places[:1]]
    for which in chosen if places else ():
        count = len(extreme_integers(values[which[0]].dtype))
        for turn in range(math.ceil(count / max(1, min(values[i].numel() for i in which)))):
            found = make_sample(node.target, values, turn)
            for place in which:
                _write(found[place], extreme_integers(values[place].dtype), turn + place)
            yield found


def _shifts(node: fx.Node, values: Sequence[Tensor], places: Sequence[int]) -> list[Tensor]:
    """Makes a sample whose shift counts reach the type's width, exceed it, or are negative."""
    found = make_sample(node.target, values)
    bits = torch.iinfo(node.meta["val"].dtype).bits
    count = values[places[1]].dtype
    numbers = [bits, bits + 1, 0, bits - 1, 33, 65, *((-1, -bits) if count.is_signed else ())]
    _write(found[places[1]], numbers, 0, every=2)
    return found


def _hard_positions(node: fx.Node, values: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Samples with positions from the first one to the last one, and from the end, negative.

    Eager refuses the negative ones of some operators; that shows nothing.
    """
    sizes = _sizes_of_dimensions(node)
    places = [
        (i, sizes[source])
        for i, source in enumerate(node.all_input_nodes)
        if sizes.get(source, 1) > 1 and _is_integer(source.meta["val"])
    ]
    for back in (0, 1, 2) if places else ():
        found = make_sample(node.target, values)
        for place, size in places:
            count = values[place].numel()
            line = (size - 1 - torch.arange(count)) % size
            if count < size:
                line = torch.linspace(size - 1, 0, count).long()
            if back and values[place].dtype.is_signed:
                line -= size * ((torch.arange(count) + back) % 2)
            dense = line.to(values[place].dtype).view(values[place].shape)
            found[place] = _stored_as(values[place], dense.to(values[place].device))
        yield found


def _integers(node: fx.Node) -> list[int]:
    """Returns the indices of the inputs that may hold any integer, not only positions."""
    positions = _positions(node)
    nodes = enumerate(node.all_input_nodes)
    return [i for i, n in nodes if n not in positions and _is_integer(n.meta["val"])]


def extreme_integers(dtype: torch.dtype) -> tuple[int, ...]:
    """Returns integers near a dtype's bounds, and some that floats cannot represent.

    The smallest is not among them: eager itself ends the process when that is divided by -1.
    """
    info = torch.iinfo(dtype)
    # 2**40 is 0 in 32 bits, and 2**31 + 5 is negative.
    wide = (2**53 + 1, 2**40, 2**31 + 5, 2**31 - 7, 2**24 + 1)
    near = (info.max, info.min + 1, info.max // 3, info.min // 5 + 1)
    return (*near, *(n for n in wide if n < info.max))


def _positions(node: fx.Node) -> set[fx.Node]:
    """Returns the argument nodes that hold positions or sizes, such as indices."""
    if packet_name(node.target) in _COUNTS:
        return set(node.all_input_nodes)
    return _named(node, _POSITIONS)


def _sizes_of_dimensions(node: fx.Node) -> dict[fx.Node, int]:
    """Returns each index argument with the size of the dimension that it indexes.

    Eager refuses others on a CPU. On an NVIDIA GPU they end all that the process does there.
    """
    given, name = bind_arguments(node), packet_name(node.target)
    dimensions: list[tuple[Any, fx.Node, int]]
    if name in ("embedding", "_embedding_bag", "_embedding_bag_forward_only"):
        dimensions = [(given["indices"], given["weight"], 0)]
    elif name.strip("_").removeprefix("unsafe_") in ("index", "index_put"):
        dimensions = list(_by_dimension(given["self"], given["indices"]))
    elif isinstance(given.get("self"), fx.Node) and isinstance(given.get("dim"), int):
        positions = given.get("index", given.get("indices"))
        dimensions = [(positions, given["self"], given["dim"])]
    else:
        return {}
    sizes: dict[fx.Node, int] = {}
    for positions, source, dim in dimensions:
        size = source.meta["val"].shape[dim : dim + 1 or None]
        if isinstance(positions, fx.Node) and size:
            sizes[positions] = min(size[0], sizes.get(positions, size[0]))
    return sizes


def _by_dimension(source: fx.Node, indices: Sequence[Any]) -> Iterator[tuple[Any, fx.Node, int]]:
    """Yields each index tensor that is no mask, its source, and the dimension it indexes."""
    dim = 0
    for positions in indices:
        value = positions.meta["val"] if isinstance(positions, fx.Node) else None
        if value is not None and value.dtype in (torch.bool, torch.uint8):
            dim += value.ndim
            continue
        if value is not None:
            yield positions, source, dim
        dim += 1


def _named(node: fx.Node, names: Collection[str]) -> set[fx.Node]:
    """Returns the nodes that a call takes for the arguments of these names."""
    found: set[fx.Node] = set()
    for name, value in bind_arguments(node).items():
        if name in names:
            fx.map_arg(value, found.add)
    return found


def _is_integer(value: Tensor) -> bool:
    dtype = value.dtype
    is_number = not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool
    return is_number and value.numel() > 0 and 0 not in value.stride()


def _write(tensor: Tensor, numbers: Sequence[float], turn: int, every: int = 1) -> None:
    """Puts numbers into a tensor, spread over it, beginning with another one in each turn.

    Args:
        tensor: It is changed.
        numbers: What is put into it.
        turn: Which.
        every: One of so many elements at most.
    """
    count = min(len(numbers), -(-tensor.numel() // every))
    places = torch.linspace(0, tensor.numel() - 1, count).long()
    for i, place in enumerate(places.tolist()):
        tensor[_index(tensor, place)] = numbers[(turn * count + i) % len(numbers)]


def _index(tensor: Tensor, place: int) -> tuple[int, ...]:
    """Converts a row-major element number to the element's multi-index."""
    position = []
    for size in reversed(tensor.shape):
        place, at = divmod(place, size)
        position.append(at)
    return tuple(reversed(position))

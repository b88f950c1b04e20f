"""Kinds of calls: what a verdict of a trial depends on, and nothing else.

A graph, the same one with a symbolic length and one with a symbolic batch make the same calls on
other sizes. A verdict on one is one on the others where a size decides neither what an operator
means nor which of its kernels a vendor takes. So the kind of a call has, of each tensor, the dtype,
the order of dimensions in memory and its sizes, written like this:

- 0 and 1 are themselves: empty tensors, and broadcasting;
- where a size is free, only whether it is below 16, and so shorter than a vector, and which other
  sizes of the call are the same one; `_ORDERED` operators also say which are larger;
- of what sums rows, also the power of 16, because rounding errors grow with the length;
- every other size is itself. Which ones are free, `_PRODUCTS` and the other tables say; of
  operators that are in none of them no size is. Weights of products and convolutions are whole,
  as are images, where strides and windows divide them and vendors choose algorithms by them.

Of arguments, those that are sizes of the call (`view`, `expand`) are written like these. Whether a
tensor has 16 elements, and whether the call is too large to be tried as it is, are part of it, too.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.graph.call_arguments import collect_call_tensors, is_pointwise
from dynamo_backends.graph.layouts import infer_layout, is_dense
from dynamo_backends.verify.trials.call_trials import (
    LARGE,
    TOO_LARGE,
    count_elements,
    used_result_indices,
)
from dynamo_backends.verify.trials.samples import packet_name

_VECTOR = 16  # from so many elements on, kernels have another form

_RESHAPE = frozenset((
    "_to_copy", "_unsafe_view", "alias", "arange", "clone", "detach", "embedding", "empty",
    "expand", "full", "new_full", "new_ones", "new_zeros", "ones", "permute", "reshape", "squeeze",
    "stack", "t", "transpose", "unbind", "unsqueeze", "view", "zeros",
))  # fmt: skip
"""Operators that move or make elements, whichever of two sizes is the larger one."""

_ORDERED = frozenset((
    "cat", "constant_pad_nd", "flip", "gather", "index", "index_select", "repeat", "select",
    "slice", "split", "split_with_sizes", "tril", "triu",
))  # fmt: skip
"""Operators that move elements up to a position, or repeat them."""

_ROWS = frozenset((
    "_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data", "all",
    "amax", "amin", "any", "argmax", "argmin", "cumsum", "logsumexp", "mean", "native_layer_norm",
    "native_layer_norm_backward", "std", "sum", "var", "var_mean",
))  # fmt: skip
"""Operators that reduce or normalise rows."""

_BATCH = {"input": (0,), "self": (0,), "grad_output": (0,), "grad_out": (0,)}

_PRODUCTS: Mapping[str, Mapping[str, Collection[int]]] = {
    "_adaptive_avg_pool2d": _BATCH,
    "_native_batch_norm_legit_no_training": _BATCH,
    "_scaled_dot_product_flash_attention_for_cpu": {
        "query": (0, 2),
        "key": (0, 2),
        "value": (0, 2),
        "attn_mask": (0, 2, 3),
    },
    "addmm": {"mat1": (0,)},
    "avg_pool2d": _BATCH,
    "baddbmm": {"self": (0, 1), "batch1": (0, 1), "batch2": (0,)},
    "bmm": {"self": (0, 1), "mat2": (0,)},
    "convolution": _BATCH,
    "max_pool2d_with_indices": _BATCH,
    "mm": {"self": (0,)},
}
"""Operators whose arguments have rows that are computed alike: the dimensions of these."""


def verdict_key(node: fx.Node) -> str:
    """Returns the cache key of a call's verdict: operator, arguments, used results.

    Of operators that work element by element, sizes matter only as far as they are 0, 1 or more,
    and large enough for vectors.

    Args:
        node: The call, whose inputs have tensors of concrete sizes.
    """
    describe, spell = _describer(node)
    arguments = [
        f"{name}={_written(value, name, describe, spell if named else str)}"
        for name, value, named in _arguments(node)
    ]
    target = str(node.target).removeprefix("aten.")
    results = used_result_indices(node)
    return f"{target}({', '.join(arguments)}){results or ''}{_scale(node)}"


Describe = Callable[[str, Tensor], str]
Spell = Callable[[int], str]


def _describer(node: fx.Node) -> tuple[Describe, Spell]:
    """Returns the functions that format a call's tensors and its size arguments."""
    name = packet_name(node.target)
    if is_pointwise(node.target):
        return lambda _, value: _tensor(value, [str(min(n, 2)) for n in value.shape]), str
    sizes = [n for v in collect_call_tensors(node) for n in v.shape]
    if name in _ROWS:
        spell = _speller(sizes, _power)
    elif name in _RESHAPE:
        spell = _speller(sizes, _length)
    elif name in _ORDERED:
        spell = _speller(sorted(sizes), _length)
    else:
        free = _PRODUCTS.get(name, {})
        row = _speller(sizes, _length)
        return lambda argument, value: _partly(value, free.get(argument, ()), row), str
    return lambda _, value: _tensor(value, [spell(n) for n in value.shape]), spell


def _partly(value: Tensor, free: Collection[int], spell: Spell) -> str:
    sizes = [spell(n) if d in free else str(n) for d, n in enumerate(value.shape)]
    return _tensor(value, sizes)


def _length(size: int) -> str:
    return "n" if size >= _VECTOR else "s"


def _power(size: int) -> str:
    return f"n{int(math.log2(size)) // 4}_"


def _speller(sizes: Iterable[int], length: Callable[[int], str]) -> Spell:
    """Writes sizes so that equal ones are written alike, by their order; other numbers whole."""
    names: dict[int, str] = {}
    for size in sizes:
        if size > 1 and size not in names:
            names[size] = f"{length(size)}{len(names)}"
    return lambda size: names.get(size, str(size))


def _arguments(node: fx.Node) -> Iterable[tuple[str, Any, bool]]:
    """Yields a call's arguments: name, value, and whether the schema type is a size."""
    schema = node.target._schema.arguments if isinstance(node.target, OpOverload) else ()
    given = [*zip(schema, node.args, strict=False)]
    given += [(a, node.kwargs[a.name]) for a in schema if a.name in node.kwargs]
    makes_range = str(node.target).startswith("aten.arange.")
    return [(a.name, value, makes_range or _is_size(a.real_type)) for a, value in given]


def _is_size(kind: Any) -> bool:
    """Returns whether a schema type is `SymInt`, or a list of that."""
    while hasattr(kind, "getElementType"):
        kind = kind.getElementType()
    return bool(kind.kind() == "SymIntType")


def _written(value: Any, name: str, describe: Describe, spell: Spell) -> str:
    if isinstance(value, fx.Node):
        return describe(name, value.meta["val"])
    if isinstance(value, list | tuple):
        return f"[{', '.join(_written(v, name, describe, spell) for v in value)}]"
    if isinstance(value, int) and not isinstance(value, bool):
        return spell(value)
    return repr(value)


def _tensor(value: Tensor, sizes: Iterable[str]) -> str:
    dtype = str(value.dtype).removeprefix("torch.")
    few = "" if value.numel() >= _VECTOR else "-"
    device = "" if value.device.type == "cpu" else f" {value.device.type}"
    return f"{dtype}[{','.join(sizes)}]{few}{_memory(value)}{device}"


def _memory(value: Tensor) -> str:
    """Formats a tensor's memory order if not row-major; its strides if it has gaps."""
    storage = infer_layout(value)
    if not is_dense(value, storage) and torch.numel(value):
        return f" strides {value.stride()}"
    order = "" if storage.is_row_major else f" order {storage.order}"
    return f"{order} expanded {storage.expanded}" if storage.expanded else order


def _scale(node: fx.Node) -> str:
    """Returns " large" or " huge" for calls that a trial shrinks or may only compile."""
    count = count_elements(node)
    return " huge" if count > TOO_LARGE else " large" if count > LARGE else ""

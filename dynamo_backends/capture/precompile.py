"""Compiles a function ahead of time for ranges of sizes (`precompile`)."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dynamo_backends._torch_private import dynamo_control
from dynamo_backends._torch_private.symbols import marked_ranges
from dynamo_backends.capture.warming import WarmUp, warm_up_calls
from dynamo_backends.interface.compiler import compiler
from dynamo_backends.interface.errors import OptionError

_CALLS = 4
"""Sets of sizes that are called with: three tell the sizes of most graphs apart."""

_OPEN = 64
"""Without an upper bound, sizes up to this much above the example's are tried."""


@dataclass(frozen=True)
class _Range:
    """The values that one dimension can have: equal names are equal sizes."""

    name: Any
    least: int
    most: int | None


def precompile(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Mapping[str, Any] | Sequence[Any] | None = None,
    backend: str = "openxla",
    options: Mapping[str, Any] | None = None,
) -> tuple[Callable[..., Any], WarmUp]:
    """Compiles a function for ranges of sizes, before the first call.

    Calls the function with the arguments, and with these repeated or cut to a few other sizes of
    the ranges (see `warm_up`). If one executable serves all sizes, later calls inside the ranges
    compile nothing; other backends have compiled the sizes of these calls.

    Examples:
        >>> batch = torch.export.Dim("batch", min=2, max=64)
        >>> compiled, done = precompile(
        ...     model, (x,), dynamic_shapes={"x": {0: batch}}, backend="onnxrt"
        ... )

    Args:
        fn: A function or module, or one that `torch.compile` has compiled; then `backend` and
            `options` are ignored.
        args: Arguments of one call. Tensors are marked as `torch._dynamo.mark_dynamic` does.
        kwargs: Keyword arguments of it.
        dynamic_shapes: As for `torch.export.export`: for each argument, by name or in order, a dict
            from dimensions to `Dim` (with `min` and `max`), `Dim.DYNAMIC` or None, or a sequence of
            these. None: the dimensions that `torch._dynamo.mark_dynamic` has marked.
        backend: Name of the backend.
        options: Options of the backend.

    Returns:
        The compiled function, and the `WarmUp` that says what was compiled.

    Raises:
        OptionError: `dynamic_shapes` does not fit the arguments, or has derived dimensions.
    """
    kwargs = dict(kwargs or {})
    ranges = _ranges(fn, args, kwargs, dynamic_shapes)
    compiled = fn
    if not dynamo_control.is_compiled(fn):
        compiled = torch.compile(fn, backend=compiler(backend, **(options or {})))
    leaves, structure = pytree.tree_flatten((tuple(args), kwargs))
    for (leaf, dim), known in ranges.items():
        if dim not in marked_ranges(leaves[leaf]):
            _mark(leaves[leaf], dim, known)
    calls = []
    for sizes in _sizes(ranges, leaves):
        given = [_with_sizes(x, i, ranges, sizes) for i, x in enumerate(leaves)]
        calls.append(pytree.tree_unflatten(given, structure))
    return compiled, warm_up_calls(compiled, calls)


def resize_by_repeating(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Repeats or cuts a tensor's elements along each dimension to reach another shape.

    Args:
        tensor: Gives dtype, device and contents; no dimension that grows is empty.
        shape: With as many dimensions.

    Raises:
        OptionError: The shape has another number of dimensions, or the tensor has no elements.
    """
    if len(shape) != tensor.ndim or (tensor.numel() == 0 and list(shape) != list(tensor.shape)):
        raise OptionError(
            f"a tensor of shape {list(tensor.shape)} cannot be resized to {list(shape)}. Give a "
            "shape with the same number of dimensions, and an example tensor that is not empty."
        )
    result = tensor.detach()
    for dim, size in enumerate(shape):
        if size != result.shape[dim]:
            places = torch.arange(size, device=tensor.device) % result.shape[dim]
            result = result.index_select(dim, places)
    return result.requires_grad_(tensor.requires_grad)


_Ranges = dict[tuple[int, int], _Range]
"""By the number of the tensor among all leaves of the arguments, and the dimension."""


def _ranges(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], shapes: Any) -> _Ranges:
    leaves, _ = pytree.tree_flatten((tuple(args), dict(kwargs)))
    found: _Ranges = {}
    if shapes is None:
        for i, leaf in enumerate(leaves):
            for dim, (least, most) in marked_ranges(leaf).items():
                found[i, dim] = _Range((i, dim), least, most)
        return found
    names = list(inspect.signature(_called(fn)).parameters)
    by_name = {**dict(zip(names, args, strict=False)), **kwargs}
    if not isinstance(shapes, Mapping):
        shapes = dict(zip(by_name, shapes, strict=False))
    unknown = sorted(set(shapes) - set(by_name))
    if unknown:
        raise OptionError(
            f"dynamic_shapes has {unknown}, which are not arguments of this call. Valid names: "
            f"{sorted(by_name)}."
        )
    numbers = {id(leaf): i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    for name, spec in shapes.items():
        for tensor, dim, wanted in _wanted(by_name[name], spec, name):
            known = _range(wanted, (numbers[id(tensor)], dim), name)
            if known is not None:
                found[numbers[id(tensor)], dim] = known
    return found


def _wanted(value: Any, spec: Any, name: str) -> Iterator[tuple[Tensor, int, Any]]:
    if spec is None:
        return
    pairs: Any = list(spec.items() if isinstance(spec, Mapping) else enumerate(spec))
    if isinstance(value, Tensor):
        for dim, wanted in pairs:
            if not isinstance(dim, int) or not -value.ndim <= dim < value.ndim:
                raise OptionError(
                    f"dynamic_shapes of {name!r} names dimension {dim!r}, but the tensor has "
                    f"{value.ndim} dimensions."
                )
            yield value, dim % value.ndim, wanted
        return
    if not isinstance(value, list | tuple | Mapping):
        raise OptionError(
            f"dynamic_shapes of {name!r} must be None, because the argument is not a tensor."
        )
    for key, inner in pairs:
        yield from _wanted(value[key], inner, f"{name}[{key!r}]")


def _range(wanted: Any, place: Any, name: str) -> _Range | None:
    from torch.export import Dim

    if wanted is None or isinstance(wanted, int) or wanted == Dim.STATIC:
        return None
    if type(wanted) is type(Dim.DYNAMIC):
        return _Range(place, wanted.min or 2, wanted.max)
    if type(wanted) is Dim:
        most = wanted.max if isinstance(wanted.max, int) else None
        return _Range(wanted.__name__, max(wanted.min, 2), most)
    raise OptionError(
        f"dynamic_shapes of {name!r} has {wanted!r}. Use a named torch.export.Dim, Dim.DYNAMIC, "
        "Dim.STATIC or None; derived dimensions are inferred during capture."
    )


def _sizes(ranges: _Ranges, leaves: Sequence[Any]) -> Iterator[dict[Any, int]]:
    """Sets of sizes, the first one those of the example; steps differ from range to range."""
    known = {r.name: (r, leaves[leaf].shape[dim]) for (leaf, dim), r in ranges.items()}
    for number in range(_CALLS if known else 1):
        sizes = {}
        for i, (name, (each, size)) in enumerate(known.items()):
            most = max(size, each.least) + _OPEN if each.most is None else each.most
            step = number * (i + 1)
            sizes[name] = each.least + (size - each.least + step) % (most - each.least + 1)
        yield sizes


def _with_sizes(value: Any, leaf: int, ranges: _Ranges, sizes: Mapping[Any, int]) -> Any:
    if not isinstance(value, Tensor):
        return value
    wanted = {
        dim: sizes[ranges[leaf, dim].name] for dim in range(value.ndim) if (leaf, dim) in ranges
    }
    shape = [wanted.get(dim, size) for dim, size in enumerate(value.shape)]
    if shape == list(value.shape):
        return value
    made = resize_by_repeating(value, shape)
    for dim in wanted:
        _mark(made, dim, ranges[leaf, dim])
    return made


def _mark(tensor: Tensor, dim: int, known: _Range) -> None:
    # Dynamo takes both bounds or none: it has no range for a least size alone.
    bounded = known.most is not None or known.least > 2
    bounds = {"min": known.least, "max": known.most or sys.maxsize} if bounded else {}
    torch._dynamo.mark_dynamic(tensor, dim, **bounds)


def _called(fn: Any) -> Callable[..., Any]:
    original = getattr(fn, "_orig_mod", None) or getattr(fn, "_torchdynamo_orig_callable", fn)
    called: Callable[..., Any] = getattr(original, "forward", original)
    return called

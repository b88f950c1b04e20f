"""The arguments of a call: bound to names, flattened and compared with what the graph is for."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dynamo_backends._torch_private import size_bounds
from dynamo_backends.interface.errors import PackageError
from dynamo_backends.package.structure import decoded


class Layout:
    """The strides that one argument has to have: the graph may depend on them.

    Args:
        like: The fake tensor of the exported graph.
    """

    def __init__(self, like: Tensor):
        self._strides = list(map(_expression, like.stride()))
        self._is_row_major = like.is_contiguous()

    @property
    def symbols(self) -> set[Any]:
        """Returns what the strides depend on."""
        return {s for x in self._strides if not isinstance(x, int) for s in x.free_symbols}

    def __call__(self, value: Tensor, sizes: Mapping[sympy.Expr, Any]) -> Tensor:
        """Returns the argument, or a copy that has those strides.

        Args:
            value: The argument.
            sizes: The values of symbols in this call.
        """
        wanted = row_major(value.shape) if self._is_row_major else self._evaluated(sizes)
        if value.stride() == wanted:
            return value
        if self._is_row_major and value.is_contiguous():  # but for the strides of sizes of 1
            return value.as_strided(value.shape, wanted)
        made = torch.empty_strided(value.shape, wanted, dtype=value.dtype, device=value.device)
        return made.copy_(value)

    def _evaluated(self, sizes: Mapping[sympy.Expr, Any]) -> tuple[int, ...]:
        return tuple(x if isinstance(x, int) else int(x.xreplace(sizes)) for x in self._strides)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides that torch gives a new tensor of a shape."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def _expression(stride: Any) -> Any:
    return stride.node.expr if isinstance(stride, torch.SymInt) else int(stride)


class Arguments:
    """The arguments with which a packaged model is called.

    Args:
        names: Names of the positional arguments.
        structure: Structure of `(args, kwargs)`, see `structure.numbered`.
        leaves: See `Portable`.
        given: See `Portable`.
    """

    def __init__(
        self,
        names: Sequence[str],
        structure: Mapping[str, Any],
        leaves: Sequence[Any],
        given: Sequence[int],
    ):
        self._names = tuple(names)
        args, kwargs = decoded(structure)
        self._count = len(args)
        self._keywords = tuple(kwargs)
        self._spec = pytree.tree_structure((args, kwargs))
        self._leaves = tuple(leaves)
        self._given = tuple(given)
        if self._spec.num_leaves != len(self._leaves):
            raise PackageError("the graph and the structure of its arguments do not match")
        paths, _ = pytree.tree_flatten_with_path((args, kwargs))
        self._checks = [
            _Check(leaf, self._name(path))
            for leaf, (path, _) in zip(self._leaves, paths, strict=True)
        ]
        for check in self._checks:
            check.require_known_strides()

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Returns the graph's inputs that are not weights.

        Raises:
            PackageError: The arguments are others than the model was saved for.
        """
        leaves, spec = pytree.tree_flatten(self._bound(args, kwargs))
        if spec != self._spec:
            raise PackageError(
                f"the arguments have a different structure than the saved ones: {self}"
            )
        sizes: dict[sympy.Expr, Any] = {}
        for check, leaf in zip(self._checks, leaves, strict=True):
            check(leaf, sizes)
        return [self._checks[i].laid_out(leaves[i], sizes) for i in self._given]

    def __str__(self) -> str:
        """Returns how the model is called: "x: float32[s0, 8], mask=None"."""
        texts = list(map(_text, self._leaves))
        args, kwargs = pytree.tree_unflatten(list(map(_Shown, texts)), self._spec)
        shown = [f"{name}: {value}" for name, value in zip(self._names, args, strict=True)]
        return ", ".join([*shown, *(f"{name}={value}" for name, value in kwargs.items())])

    def _name(self, path: Any) -> str:
        """Returns what a leaf is called: "x", "states[0]"."""
        is_keyword, place = path[0].idx == 1, path[1]
        name = place.key if is_keyword else self._names[place.idx]
        return f"{name}{pytree.keystr(path[2:])}"

    def _bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        named = dict(kwargs)
        given = [*args, *(named.pop(n) for n in self._names[len(args) : self._count] if n in named)]
        if len(given) != self._count or named.keys() != set(self._keywords):
            raise PackageError(f"the model was saved for calls with {self}")
        return tuple(given), {name: named[name] for name in self._keywords}


class _Shown:
    def __init__(self, text: str):
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _text(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}[{', '.join(map(str, leaf.shape))}]"
    return str(leaf)


class _Check:
    """Compares one leaf with what it was when the model was saved."""

    def __init__(self, leaf: Any, name: str):
        self._leaf = leaf
        self._name = name
        is_tensor = isinstance(leaf, Tensor)
        self._layout = Layout(leaf) if is_tensor else None
        self._sizes = [_size(n) for n in leaf.shape] if is_tensor else [_size(leaf)]
        # Now: a fake tensor's device is another one while some thread computes with its mode.
        self._kind = _kind(leaf) if is_tensor else None

    def __call__(self, value: Any, sizes: dict[sympy.Expr, Any]) -> None:
        if not isinstance(self._leaf, Tensor):
            if isinstance(self._leaf, torch.SymInt) and type(value) is int:
                self._compare(self._sizes[0], value, sizes)
            elif type(value) is not type(self._leaf) or value != self._leaf:
                raise PackageError(
                    f"{self._name} is {value!r}, but the model was saved for {self._leaf!r}"
                )
            return
        if not isinstance(value, Tensor) or self._kind != _kind(value):
            raise PackageError(f"{self._name} is {_given(value)}, {self._wanted()}")
        for known, size in zip(self._sizes, value.shape, strict=True):
            self._compare(known, size, sizes, value)

    def require_known_strides(self) -> None:
        """Raises `PackageError` if the layout does not follow from sizes."""
        known = {k[0] for k in self._sizes if isinstance(k, tuple)}
        if self._layout is not None and not self._layout.symbols <= known:
            raise PackageError(
                f"{self._name} has strides that cannot be computed from its sizes. Call "
                "contiguous() on the arguments that you save the model with."
            )

    def laid_out(self, value: Any, sizes: Mapping[sympy.Expr, Any]) -> Any:
        """Returns the leaf in the layout that the graph is for."""
        return value if self._layout is None else self._layout(value, sizes)

    def _compare(
        self, known: Any, size: int, sizes: dict[sympy.Expr, Any], value: Any = None
    ) -> None:
        if isinstance(known, int):
            fits = known == size
        else:
            expression, lower, upper = known
            fits = lower <= size and (upper is None or size <= upper)
            if not expression.is_Symbol and expression.free_symbols <= sizes.keys():
                fits = fits and int(expression.xreplace(sizes)) == size
            elif not expression.is_Symbol:
                fits = fits and _is_value(expression, size)
            fits = fits and sizes.setdefault(expression, sympy.Integer(size)) == size
        if not fits:
            shown = _given(size if value is None else value)
            raise PackageError(f"{self._name} is {shown}, {self._wanted()}")

    def _wanted(self) -> str:
        ranges = [
            f"{expression} {lower} to {'any' if upper is None else upper}"
            for expression, lower, upper in (k for k in self._sizes if not isinstance(k, int))
        ]
        text = f"but the model was saved for {_text(self._leaf)}"
        if self._kind is not None and self._kind[1] != "cpu":
            text += f" on {self._kind[1]}"
        return text + (f" with {', '.join(ranges)}" if ranges else "")


@functools.lru_cache(maxsize=1024)
def _is_value(expression: sympy.Expr, size: int) -> bool:
    """Returns whether an expression, such as 2*s0, has a value for some integers."""
    symbol, *others = expression.free_symbols
    return bool(others or sympy.solve(expression - size, symbol))


def _kind(value: Tensor) -> tuple[torch.dtype, str, int]:
    return value.dtype, value.device.type, value.ndim


def _size(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return (value.node.expr, *size_bounds(value))
    return value


def _given(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return _text(value) + ("" if value.device.type == "cpu" else f" on {value.device.type}")

"""The operations of `fd.ops` that this package uses, checked and interpreted with torch.

They are called by position only.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.nvfuser.double.types import FLOATS, HALVES, INTEGERS, TORCH, Val, check

_UNARY: dict[str, tuple[Callable[[Tensor], Tensor], frozenset[str]]] = {
    **{
        name: (getattr(torch, name), FLOATS)
        for name in (
            "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "erf",
            "erfc", "erfinv", "exp", "exp2", "expm1", "floor", "lgamma", "log", "log10", "log1p",
            "log2", "reciprocal", "round", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan",
            "tanh", "trunc",
        )
    },
    "abs": (torch.abs, FLOATS | INTEGERS),
    "neg": (torch.neg, FLOATS | INTEGERS),
    "bitwise_not": (torch.bitwise_not, INTEGERS),
    "logical_not": (torch.logical_not, frozenset({"Bool"})),
    "set": (lambda x: x, frozenset(TORCH)),
}  # fmt: skip
_TESTS: dict[str, Callable[[Tensor], Tensor]] = {"signbit": torch.signbit}
_NUMBERS = FLOATS | INTEGERS
_BOOL = frozenset({"Bool"})
_BINARY: dict[str, tuple[Callable[..., Any], frozenset[str]]] = {
    "add": (torch.add, _NUMBERS),
    "sub": (torch.sub, _NUMBERS),
    "mul": (torch.mul, _NUMBERS),
    "div": (lambda x, y: _quotient(x, y), _NUMBERS),
    "fmod": (torch.fmod, FLOATS),
    "mod": (torch.fmod, INTEGERS),
    "pow": (torch.pow, FLOATS),
    "atan2": (torch.atan2, FLOATS),
    "nextafter": (torch.nextafter, FLOATS),
    "maximum": (torch.maximum, _NUMBERS),
    "minimum": (torch.minimum, _NUMBERS),
    "bitwise_and": (torch.bitwise_and, INTEGERS),
    "bitwise_or": (torch.bitwise_or, INTEGERS),
    "bitwise_xor": (torch.bitwise_xor, INTEGERS),
    "logical_and": (torch.logical_and, _BOOL),
    "logical_or": (torch.logical_or, _BOOL),
}
_COMPARISONS: dict[str, Callable[..., Tensor]] = {
    name: getattr(torch, name) for name in ("eq", "ge", "gt", "le", "lt", "ne")
}
_REDUCTIONS: dict[str, tuple[Callable[..., Tensor], frozenset[str]]] = {
    "sum": (lambda x, dims: x.sum(dims), FLOATS | {"Int"}),
    "prod": (lambda x, dims: _product(x, dims), FLOATS | {"Int"}),
    "max": (lambda x, dims: x.amax(dims), _NUMBERS),
    "min": (lambda x, dims: x.amin(dims), _NUMBERS),
}
_SCALAR: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
}


def _quotient(x: Tensor, y: Tensor) -> Tensor:
    return torch.div(x, y) if x.dtype.is_floating_point else torch.div(x, y, rounding_mode="trunc")


def _product(x: Tensor, dims: Sequence[int]) -> Tensor:
    for d in sorted(dims, reverse=True):
        x = x.prod(d)
    return x


class Operations:
    """`fd.ops`.

    Args:
        owner: Gives the definition that is open.
    """

    def __init__(self, owner: Callable[[], Any]):
        self._owner = owner

    def __dir__(self) -> list[str]:
        own = [name for name in vars(type(self)) if not name.startswith("_")]
        return [*own, *_UNARY, *_TESTS, *_BINARY, *_COMPARISONS, *_REDUCTIONS]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in _UNARY:
            return lambda x: self._unary(name, x)
        if name in _TESTS:
            return lambda x: self._test(name, x)
        if name in _BINARY:
            return lambda lhs, rhs: self._binary(name, lhs, rhs)
        if name in _COMPARISONS:
            return lambda lhs, rhs: self._comparison(name, lhs, rhs)
        if name in _REDUCTIONS:
            return lambda arg, dims: self._reduction(name, arg, dims)
        raise AttributeError(f"nvFuser has no operation {name!r}")

    # What all of them need.

    def _new(
        self,
        evaluate: Callable[..., Any],
        sources: Sequence[Val],
        dtype: str,
        broadcast: Sequence[bool | None] | None,
    ) -> Val:
        owner = self._owner()
        owner.record()
        for source in sources:
            check(source.owner is owner, "a value of another definition")
        flags = None if broadcast is None else tuple(broadcast)
        return Val(owner, dtype, flags, evaluate, tuple(sources))

    @staticmethod
    def _tensor(x: object, kinds: frozenset[str] = frozenset(TORCH)) -> Val:
        check(isinstance(x, Val) and x.is_tensor, f"{x!r} is no tensor")
        assert isinstance(x, Val)
        check(x.dtype in kinds, f"a tensor of type {x.dtype} where one of {sorted(kinds)} belongs")
        return x

    @staticmethod
    def _dims(dims: object, ndim: int) -> list[int]:
        check(isinstance(dims, list), f"{dims!r} is no list of dimensions")
        assert isinstance(dims, list)
        check(all(type(d) is int and 0 <= d < ndim for d in dims), f"{dims} of {ndim} dimensions")
        check(len(set(dims)) == len(dims), f"a dimension occurs twice in {dims}")
        return dims

    def _shape(self, sizes: object, least: int = 1) -> tuple[list[Val], Callable[..., list[int]]]:
        """The symbolic ones among sizes, and what makes sizes of their values."""
        check(isinstance(sizes, list), f"{sizes!r} is no list of sizes")
        assert isinstance(sizes, list)
        symbolic = [s for s in sizes if isinstance(s, Val)]
        for s in symbolic:
            check(not s.is_tensor and s.dtype == "Int", "a size is no integer")
        numbers = [s for s in sizes if not isinstance(s, Val)]
        check(all(type(n) is int and n >= least for n in numbers), f"wrong sizes {numbers}")

        def concrete(values: Sequence[int]) -> list[int]:
            remaining = iter(values)
            return [next(remaining) if isinstance(s, Val) else s for s in sizes]

        return symbolic, concrete

    def _operands(self, *operands: object) -> tuple[list[Val], str, list[bool | None]]:
        """Values of one type and rank, at least one of them a tensor."""
        vals = [x for x in operands if isinstance(x, Val)]
        check(len(vals) == len(operands), f"an operand of {operands} is no value")
        kinds = {v.dtype for v in vals}
        check(len(kinds) == 1, f"operands of types {sorted(kinds)}")
        tensors = [v for v in vals if v.is_tensor]
        check(tensors, "no operand is a tensor")
        check(len({v.ndim for v in tensors}) == 1, f"ranks {[v.ndim for v in tensors]}")
        return vals, kinds.pop(), self._merged(tensors)

    @staticmethod
    def _merged(tensors: Sequence[Val]) -> list[bool | None]:
        """A dimension is broadcast if it is so in all, and is not if it is not in one."""

        def merge(flags: Sequence[bool | None]) -> bool | None:
            if False in flags:
                return False
            return None if None in flags else True

        return [merge([v.broadcast[d] for v in tensors]) for d in range(tensors[0].ndim)]  # type: ignore[index]

    @staticmethod
    def _elementwise(fn: Callable[..., Any], vals: Sequence[Val]) -> Callable[..., Tensor]:
        """Checks sizes before a function of elements runs: only broadcast dimensions differ."""

        def run(*values: Any) -> Tensor:
            tensors = [(v, t) for v, t in zip(vals, values, strict=True) if v.is_tensor]
            for d in range(tensors[0][0].ndim):
                largest = max(t.shape[d] for _, t in tensors)
                for v, t in tensors:
                    fits = t.shape[d] == largest or (
                        t.shape[d] == 1 and v.broadcast[d] is not False
                    )
                    check(fits, f"sizes {[tuple(t.shape) for _, t in tensors]} in dimension {d}")
            like = tensors[0][1]
            full = [
                x if v.is_tensor else torch.tensor(x, dtype=TORCH[v.dtype], device=like.device)
                for v, x in zip(vals, values, strict=True)
            ]
            return fn(*full)

        return run

    # The operations.

    def _unary(self, name: str, x: Val) -> Val:
        fn, kinds = _UNARY[name]
        self._tensor(x, kinds)
        return self._new(fn, (x,), x.dtype, x.broadcast)

    def _test(self, name: str, x: Val) -> Val:
        self._tensor(x, FLOATS)
        return self._new(_TESTS[name], (x,), "Bool", x.broadcast)

    def _binary(self, name: str, lhs: Val, rhs: Val) -> Val:
        if not lhs.is_tensor and not rhs.is_tensor:
            check(name in _SCALAR and lhs.dtype == rhs.dtype, f"{name} of two numbers")
            return self._new(_SCALAR[name], (lhs, rhs), lhs.dtype, None)
        fn, kinds = _BINARY[name]
        vals, kind, flags = self._operands(lhs, rhs)
        check(kind in kinds, f"{name} of type {kind}")
        return self._new(self._elementwise(fn, vals), vals, kind, flags)

    def _comparison(self, name: str, lhs: Val, rhs: Val) -> Val:
        vals, kind, flags = self._operands(lhs, rhs)
        check(kind not in HALVES, f"{name} of type {kind}")
        return self._new(self._elementwise(_COMPARISONS[name], vals), vals, "Bool", flags)

    def _reduction(self, name: str, arg: Val, dims: list[int]) -> Val:
        fn, kinds = _REDUCTIONS[name]
        dims = self._dims(dims, self._tensor(arg, kinds).ndim)
        check(dims, f"{name} along no dimension")
        flags = [f for d, f in enumerate(arg.broadcast or ()) if d not in dims]
        return self._new(lambda x: fn(x, dims), (arg,), arg.dtype, flags)

    def var_mean(
        self, arg: Val, dims: list[int], correction: int = 1, keepdim: bool = False
    ) -> tuple[Val, Val]:
        dims = self._dims(dims, self._tensor(arg, FLOATS).ndim)
        check(dims and not keepdim, "var_mean along no dimension")
        check(type(correction) is int and correction >= 0, f"a correction of {correction}")
        flags = [f for d, f in enumerate(arg.broadcast or ()) if d not in dims]
        both = [
            lambda x: torch.var(x, dims, correction=correction),
            lambda x: torch.mean(x, dims),
        ]
        var, mean = (self._new(fn, (arg,), arg.dtype, flags) for fn in both)
        return var, mean

    def where(self, condition: Val, x: Val, y: Val) -> Val:
        self._tensor(condition, _BOOL)
        vals, kind, _ = self._operands(x, y)
        tensors = [condition, *(v for v in vals if v.is_tensor)]
        check(len({v.ndim for v in tensors}) == 1, f"ranks {[v.ndim for v in tensors]}")
        every = [condition, *vals]
        return self._new(self._elementwise(torch.where, every), every, kind, self._merged(tensors))

    def cast(self, arg: Val, dtype: Any) -> Val:
        kind = self._owner().kind(dtype)
        if not arg.is_tensor:
            check(arg.dtype == "Int" and kind in FLOATS, f"a number of {arg.dtype} as {kind}")
            return self._new(float, (arg,), kind, None)
        check(kind != "Bool", "whether a number becomes true is asked by ne")
        for a, b in ((arg.dtype, kind), (kind, arg.dtype)):
            check(a not in HALVES or b == "Float", f"{arg.dtype} to {kind} without float32")
        return self._new(lambda x: x.to(TORCH[kind]), (arg,), kind, arg.broadcast)

    def size(self, arg: Val, dim: int) -> Val:
        self._dims([dim], self._tensor(arg).ndim)
        return self._new(lambda x: int(x.shape[dim]), (arg,), "Int", None)

    def broadcast(self, arg: Val, is_broadcast_dim: list[bool]) -> Val:
        self._tensor(arg)
        check(isinstance(is_broadcast_dim, list), "no list of flags")
        check(all(type(f) is bool for f in is_broadcast_dim), f"wrong flags {is_broadcast_dim}")
        check(is_broadcast_dim.count(False) == arg.ndim, f"{is_broadcast_dim} of {arg.ndim}")
        old = iter(arg.broadcast or ())
        flags = [True if new else next(old) for new in is_broadcast_dim]

        def run(x: Tensor) -> Tensor:
            for d, new in enumerate(is_broadcast_dim):
                x = x.unsqueeze(d) if new else x
            return x

        return self._new(run, (arg,), arg.dtype, flags)

    def squeeze(self, arg: Val, dims: list[int], squeeze_expanded: bool = False) -> Val:
        dims = self._dims(dims, self._tensor(arg).ndim)
        assert arg.broadcast is not None
        check(
            all(arg.broadcast[d] is not False for d in dims),
            "Can not squeeze non-broadcasting dimension(s).",
        )
        flags = [f for d, f in enumerate(arg.broadcast) if d not in dims]

        def run(x: Tensor) -> Tensor:
            check(all(x.shape[d] == 1 for d in dims), f"{dims} of {tuple(x.shape)} squeezed")
            for d in sorted(dims, reverse=True):
                x = x.squeeze(d)
            return x

        return self._new(run, (arg,), arg.dtype, flags)

    def broadcast_in_dim(self, arg: Val, shape: list[Any], broadcast_dims: list[int]) -> Val:
        symbolic, concrete = self._shape(shape)
        places = self._dims(broadcast_dims, len(shape))
        check(len(places) == self._tensor(arg).ndim, f"{arg.ndim} dimensions at {places}")
        check(places == sorted(places), f"{places} do not ascend")
        assert arg.broadcast is not None
        flags: list[bool | None] = [None] * len(shape)
        for d, flag in zip(places, arg.broadcast, strict=True):
            flags[d] = False if flag is False else None

        def run(x: Tensor, *sizes: int) -> Tensor:
            target = concrete(sizes)
            for d, have, flag in zip(places, x.shape, arg.broadcast or (), strict=True):
                fits = have == target[d] or (have == 1 and flag is not False)
                check(fits, f"{tuple(x.shape)} broadcast to {target} at {places}")
            spread = [1] * len(target)
            for d, have in zip(places, x.shape, strict=True):
                spread[d] = have
            return x.reshape(spread).expand(target)

        return self._new(run, (arg, *symbolic), arg.dtype, flags)

    def reshape(self, arg: Val, new_shape: list[Any]) -> Val:
        symbolic, concrete = self._shape(new_shape)
        self._tensor(arg)

        def run(x: Tensor, *sizes: int) -> Tensor:
            target = concrete(sizes)
            check(math.prod(target) == x.numel(), f"{tuple(x.shape)} reshaped to {target}")
            return x.reshape(target)

        return self._new(run, (arg, *symbolic), arg.dtype, [None] * len(new_shape))

    def permute(self, arg: Val, dims: list[int]) -> Val:
        dims = self._dims(dims, self._tensor(arg).ndim)
        check(len(dims) == arg.ndim, f"{arg.ndim} dimensions permuted by {dims}")
        flags = [arg.broadcast[d] for d in dims]  # type: ignore[index]
        return self._new(lambda x: x.permute(dims), (arg,), arg.dtype, flags)

    def slice(self, arg: Val, start_indices: list[Any], end_indices: list[Any]) -> Val:
        ndim = self._tensor(arg).ndim
        check(len(start_indices) == len(end_indices) == ndim, "a slice of another rank")
        first, starts = self._shape(start_indices, 0)
        last, ends = self._shape(end_indices, 0)

        def run(x: Tensor, *sizes: int) -> Tensor:
            begin, end = starts(sizes[: len(first)]), ends(sizes[len(first) :])
            for d, (a, b) in enumerate(zip(begin, end, strict=True)):
                check(0 <= a < b <= x.shape[d], f"{begin} to {end} of {tuple(x.shape)}")
                x = x.narrow(d, a, b - a)
            return x

        return self._new(run, (arg, *first, *last), arg.dtype, [None] * ndim)

    def cat(self, tensors: list[Val], dim: int = 0, manual_padding: bool = False) -> Val:
        check(isinstance(tensors, list) and len(tensors) > 1, "no list of tensors")
        for x in tensors:
            self._tensor(x)
        check(len({x.dtype for x in tensors}) == 1, f"types {[x.dtype for x in tensors]}")
        check(len({x.ndim for x in tensors}) == 1, f"ranks {[x.ndim for x in tensors]}")
        self._dims([dim], tensors[0].ndim)
        return self._new(
            lambda *xs: torch.cat(xs, dim), tensors, tensors[0].dtype, [None] * tensors[0].ndim
        )

    def pad(self, arg: Val, pad_widths: list[int], value: Val | None = None) -> Val:
        self._tensor(arg)
        check(isinstance(pad_widths, list) and len(pad_widths) % 2 == 0, f"widths {pad_widths}")
        check(len(pad_widths) <= 2 * arg.ndim, "more widths than dimensions")
        check(all(type(w) is int and w >= 0 for w in pad_widths), f"widths {pad_widths}")
        assert value is not None
        self._same_family(value, arg.dtype)
        return self._new(
            lambda x, number: torch.nn.functional.pad(x, pad_widths, value=number),
            (arg, value),
            arg.dtype,
            [None] * arg.ndim,
        )

    @staticmethod
    def _same_family(number: Val, kind: str) -> None:
        families = (FLOATS | HALVES, INTEGERS, _BOOL)
        check(not number.is_tensor, "the filling is a tensor")
        check(
            any(number.dtype in f and kind in f for f in families),
            f"a tensor of {kind} is filled with a number of {number.dtype}",
        )

    def full(self, shape: list[Any], fill_value: Val, dtype: Any) -> Val:
        symbolic, concrete = self._shape(shape)
        owner = self._owner()
        kind = owner.kind(dtype)
        self._same_family(fill_value, kind)
        return self._new(
            lambda number, *sizes: torch.full(concrete(sizes), number, dtype=TORCH[kind]),
            (fill_value, *symbolic),
            kind,
            [s == 1 if isinstance(s, int) else None for s in shape],
        )

    def iota(self, length: Val, start: Val, step: Val, dtype: Any) -> Val:
        kind = self._owner().kind(dtype)
        check(kind == "Int", f"iota of {kind}")
        for x in (length, start, step):
            check(not x.is_tensor and x.dtype == "Int", "iota of no integer")
        return self._new(
            lambda n, a, s: a + s * torch.arange(n), (length, start, step), kind, [None]
        )

    def stride_order(self, arg: Val, stride_order: list[int]) -> Val:
        order = self._dims(stride_order, self._tensor(arg).ndim)
        check(len(order) == arg.ndim, f"an order {order} of {arg.ndim} dimensions")
        outermost = sorted(range(arg.ndim), key=lambda d: -order[d])

        def run(x: Tensor) -> Tensor:
            dense = x.permute(outermost).contiguous()  # the same memory if it is so already
            inverse = sorted(range(x.ndim), key=outermost.__getitem__)
            return dense.permute(inverse)

        return self._new(run, (arg,), arg.dtype, arg.broadcast)

    def matmul(self, arg1: Val, arg2: Val) -> Val:
        kinds = FLOATS | HALVES
        x, y = self._tensor(arg1, kinds), self._tensor(arg2, kinds)
        check(x.dtype == y.dtype, f"a product of {x.dtype} and {y.dtype}")
        rank = {(1, 1): 0, (2, 1): 1, (2, 2): 2, (3, 3): 3}.get((x.ndim, y.ndim))
        check(rank is not None, f"a product of ranks {x.ndim} and {y.ndim}")
        return self._new(torch.matmul, (x, y), x.dtype, [None] * (rank or 0))

    def linear(self, arg1: Val, arg2: Val, bias: Val | None = None) -> Val:
        kinds = FLOATS | HALVES
        sources = [self._tensor(a, kinds) for a in (arg1, arg2, bias) if a is not None]
        check(len({s.dtype for s in sources}) == 1, f"types {[s.dtype for s in sources]}")
        check([s.ndim for s in sources] in ([2, 2], [2, 2, 1]), "ranks of a linear layer")
        return self._new(torch.nn.functional.linear, sources, arg1.dtype, [None, None])

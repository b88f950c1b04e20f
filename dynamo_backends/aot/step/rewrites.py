"""Calls of an optimizer that take Python numbers, for numbers that have become tensors.

`param.add_(grad, alpha=-lr)` reads the number out of a tensor, which a graph cannot hold; the rows
here say the same with tensors. Calls on lists (`torch._foreach_mul_`) become one call per tensor.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def _scaled(x: Any, by: Any) -> Any:
    return x if isinstance(by, int | float) and by == 1 else x * by


def _add(x: Tensor, y: Any, *, alpha: Any = 1) -> Tensor:
    return x.add(_scaled(y, alpha))


def _add_(x: Tensor, y: Any, *, alpha: Any = 1) -> Tensor:
    return x.add_(_scaled(y, alpha))


def _sub(x: Tensor, y: Any, *, alpha: Any = 1) -> Tensor:
    return x.sub(_scaled(y, alpha))


def _sub_(x: Tensor, y: Any, *, alpha: Any = 1) -> Tensor:
    return x.sub_(_scaled(y, alpha))


def _addcmul(x: Tensor, y: Tensor, z: Tensor, *, value: Any = 1) -> Tensor:
    return x.addcmul(_scaled(y, value), z)


def _addcmul_(x: Tensor, y: Tensor, z: Tensor, *, value: Any = 1) -> Tensor:
    return x.addcmul_(_scaled(y, value), z)


def _addcdiv(x: Tensor, y: Tensor, z: Tensor, *, value: Any = 1) -> Tensor:
    return x.addcdiv(_scaled(y, value), z)


def _addcdiv_(x: Tensor, y: Tensor, z: Tensor, *, value: Any = 1) -> Tensor:
    return x.addcdiv_(_scaled(y, value), z)


def _like(number: Any, x: Tensor) -> Any:
    return number.to(x.dtype) if isinstance(number, Tensor) else number


def _lerp(x: Tensor, end: Tensor, weight: Any) -> Tensor:
    return x.lerp(end, _like(weight, x))


def _lerp_(x: Tensor, end: Tensor, weight: Any) -> Tensor:
    return x.lerp_(end, _like(weight, x))


def _clamp(x: Tensor, min: Any = None, max: Any = None) -> Tensor:
    x = x if min is None else torch.maximum(x, torch.as_tensor(min).to(x.dtype))
    return x if max is None else torch.minimum(x, torch.as_tensor(max).to(x.dtype))


def _clamp_(x: Tensor, min: Any = None, max: Any = None) -> Tensor:
    return x.copy_(_clamp(x, min, max))


_T = torch.Tensor

WITH_TENSORS: dict[Callable[..., Any], Callable[..., Any]] = {
    _T.add: _add, torch.add: _add, _T.add_: _add_,
    _T.sub: _sub, torch.sub: _sub, _T.sub_: _sub_,
    _T.addcmul: _addcmul, torch.addcmul: _addcmul, _T.addcmul_: _addcmul_,
    _T.addcdiv: _addcdiv, torch.addcdiv: _addcdiv, _T.addcdiv_: _addcdiv_,
}  # fmt: skip
"""Functions whose keyword `alpha` or `value` is a number, and the same for tensors."""

POSITIONAL: dict[Callable[..., Any], Callable[..., Any]] = {
    _T.lerp: _lerp, torch.lerp: _lerp, _T.lerp_: _lerp_,
    _T.clamp: _clamp, torch.clamp: _clamp, _T.clamp_: _clamp_,
}  # fmt: skip
"""Functions whose further arguments are all numbers, or tensors of the first one's dtype."""

NEW_INSTEAD: dict[Callable[..., Any], Callable[..., Any]] = {
    _T.__iadd__: torch.add, _T.__isub__: torch.sub, _T.__imul__: torch.mul,
    _T.__itruediv__: torch.div, _T.__ipow__: torch.pow,
}  # fmt: skip
"""`lr *= 0.5` makes a new number where `lr` is one, and must not change a tensor."""


def written(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Tensor]:
    """The tensors that a call writes to."""
    name = getattr(function, "__name__", "")
    if function in NEW_INSTEAD or (name.endswith("_") and not name.endswith("__")):
        targets = args[0] if args and isinstance(args[0], list | tuple) else args[:1]
        yield from (t for t in targets if isinstance(t, Tensor))
    if isinstance(kwargs.get("out"), Tensor):
        yield kwargs["out"]


def has_tensor_number(kwargs: dict[str, Any]) -> bool:
    """Whether a keyword that should be a number is a tensor."""
    return any(isinstance(kwargs.get(name), Tensor) for name in ("alpha", "value"))


def takes_numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether one of a function's last arguments is a number that has become a tensor."""
    last = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, Tensor)]
    return any(a.ndim == 0 for a in last)


def like_numbers(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """For updates of a 0-d tensor in place: a tensor that stands for a number is rounded first."""
    x, y = args
    if isinstance(x, Tensor) and isinstance(y, Tensor) and x.ndim == y.ndim == 0:
        return x, y.to(x.dtype)
    return args


def on_lists(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """For a function on lists of tensors: the same, by one call per tensor; else None."""
    name = getattr(function, "__name__", "")
    if not name.startswith("_foreach_"):
        return None
    single = name.removeprefix("_foreach_")
    if single == "norm":
        return _norms
    method = getattr(_T, single, None)
    if method is None:
        return None

    def each(*args: Any, **kwargs: Any) -> list[Any]:
        count = len(args[0])
        return [
            _single(
                method,
                tuple(_at(a, i, count) for a in args),
                {k: _at(a, i, count) for k, a in kwargs.items()},
            )
            for i in range(count)
        ]

    return each


def _single(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if method in POSITIONAL and takes_numbers(args, kwargs):
        method = POSITIONAL[method]
    return method(*args, **kwargs)


def _at(value: Any, i: int, count: int) -> Any:
    is_list = isinstance(value, list | tuple) and len(value) == count
    return value[i] if is_list else value


def _norms(tensors: Sequence[Tensor], order: Any = 2, dtype: Any = None) -> list[Tensor]:
    return [torch.linalg.vector_norm(t, order, dtype=dtype) for t in tensors]

"""Calls of an optimizer that take Python numbers, for numbers that have become tensors.

`param.add_(grad, alpha=-lr)` reads the number out of a tensor, which a graph cannot hold; the rows
here say the same with tensors. Calls on lists (`torch._foreach_mul_`) become one call per tensor.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dynamo_backends._torch_private import amp_scaling


def _scaled(x: Any, by: Any, to: Tensor) -> Any:
    """Returns a summand, multiplied in the dtype of the sum."""
    if isinstance(by, int | float) and by == 1:
        return x
    if isinstance(x, Tensor) and x.dtype is not to.dtype and (x.ndim or not to.ndim):
        x = x.to(torch.promote_types(x.dtype, to.dtype))
    return x * by


def _with_alpha(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, y, *, alpha=1: function(x, _scaled(y, alpha, x))


def _with_value(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, y, z, *, value=1: function(x, _scaled(y, value, x), z)


def _clamp(x: Tensor, min: Any = None, max: Any = None) -> Tensor:
    x = x if min is None else torch.maximum(x, _bound(min, x))
    return x if max is None else torch.minimum(x, _bound(max, x))


def _bound(number: Any, x: Tensor) -> Tensor:
    return number if isinstance(number, Tensor) else torch.as_tensor(number).to(x.dtype)


def _clamp_(x: Tensor, min: Any = None, max: Any = None) -> Tensor:
    return x.copy_(_clamp(x, min, max))


_T = torch.Tensor

WITH_TENSORS: dict[Callable[..., Any], Callable[..., Any]] = {
    **{f: _with_alpha(f) for f in (_T.add, torch.add, _T.add_, _T.sub, torch.sub, _T.sub_)},
    **{f: _with_value(f) for f in (_T.addcmul, torch.addcmul, _T.addcmul_)},
    **{f: _with_value(f) for f in (_T.addcdiv, torch.addcdiv, _T.addcdiv_)},
}
"""Functions whose keyword `alpha` or `value` is a number, and the same for tensors."""

POSITIONAL: dict[Callable[..., Any], Callable[..., Any]] = {
    _T.lerp: torch.lerp, torch.lerp: torch.lerp, _T.lerp_: _T.lerp_,
    _T.clamp: _clamp, torch.clamp: _clamp, _T.clamp_: _clamp_,
}  # fmt: skip
"""Functions whose further arguments are all numbers, or tensors of the first one's dtype."""

NUMBERS = frozenset(("alpha", "value"))
"""Keywords whose values torch reads out of tensors."""

NEW_INSTEAD: dict[Callable[..., Any], Callable[..., Any]] = {
    _T.__iadd__: torch.add, _T.__isub__: torch.sub, _T.__imul__: torch.mul,
    _T.__itruediv__: torch.div, _T.__ipow__: torch.pow,
    _T.add_: torch.add, _T.sub_: torch.sub, _T.mul_: torch.mul, _T.div_: torch.div,
    _T.pow_: torch.pow, _T.floor_divide_: torch.floor_divide, _T.remainder_: torch.remainder,
}  # fmt: skip
"""`lr *= 0.5` makes a new number where `lr` is one, and must not change a tensor."""

OF_NUMBERS: dict[Callable[..., Any], Callable[..., Any]] = {
    **NEW_INSTEAD,
    _T.__ifloordiv__: torch.floor_divide,
    _T.__imod__: torch.remainder,
}
"""The same by the names that Python's operators have in a trace."""


WITH_NUMBERS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.full: lambda size, fill_value, **given: torch.zeros(size, **given).copy_(fill_value),
    torch.full_like: lambda x, fill_value, **given: torch.zeros_like(x, **given).copy_(fill_value),
    _T.new_full: lambda x, size, fill_value, **given: x.new_zeros(size, **given).copy_(fill_value),
}
"""Functions that take Python numbers only, for numbers that have become tensors."""


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _embedding(
    x: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if max_norm is not None and not sparse:
        _limit_rows(weight, x, max_norm, norm_type)
        max_norm = None
    return F.embedding(x, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)


@torch.no_grad()
def _limit_rows(weight: Tensor, rows: Tensor, largest: float, order: float) -> None:
    """As `torch.embedding_renorm_`: scales rows that are looked up and longer than a limit."""
    is_used = torch.zeros(len(weight), device=weight.device).index_fill(0, rows.flatten(), 1.0) > 0
    norms = torch.linalg.vector_norm(weight, order, dim=1)
    scales = torch.where(is_used & (norms > largest), largest / (norms + 1e-7), 1.0)
    weight.mul_(scales.unsqueeze(1))


def _batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: Any = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """A factor of averages that is a number among the inputs, such as one over a counter."""
    has_averages = running_mean is not None and running_var is not None
    if not (training and has_averages and isinstance(momentum, Tensor)):
        return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    assert running_mean is not None and running_var is not None
    mean, var = torch.zeros_like(running_mean), torch.zeros_like(running_var)
    normal = F.batch_norm(x, mean, var, weight, bias, True, 1.0, eps)
    with torch.no_grad():
        for average, new in ((running_mean, mean), (running_var, var)):
            average.copy_(new * momentum + average * (1 - momentum))
    return normal


def _one_hot(x: Tensor, num_classes: int = -1) -> Tensor:
    """Checks classes as eager does; a trace of `one_hot` would leave that out."""
    if num_classes > 0:
        check = torch.ops.aten._assert_async.msg
        check((x >= 0).all(), "Class values must be non-negative.")
        check((x < num_classes).all(), "Class values must be smaller than num_classes.")
    return F.one_hot(x, num_classes)


def _check_and_unscale(gradients: Sequence[Tensor], found: Tensor, inverse: Tensor) -> None:
    for gradient in gradients:
        is_finite = torch.isfinite(gradient).all()
        found.copy_(torch.where(is_finite, found, torch.ones_like(found)))
        gradient.mul_(inverse)


def _update_scale(
    scale: Tensor, successes: Tensor, found: Tensor, growth: float, backoff: float, interval: int
) -> Tensor:
    overflow = found != 0
    more = successes + 1
    is_enough = more == interval
    wide = scale.double()
    grown = (wide * growth).to(scale.dtype)
    new = torch.where(is_enough & torch.isfinite(grown), grown, scale)
    scale.copy_(torch.where(overflow, (wide * backoff).to(scale.dtype), new))
    successes.copy_(torch.where(overflow | is_enough, torch.zeros_like(more), more))
    return scale


IN_OTHER_WORDS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch._weight_norm: _weight_norm, F.embedding: _embedding, F.batch_norm: _batch_norm,
    F.one_hot: _one_hot, amp_scaling.CHECK_AND_UNSCALE: _check_and_unscale,
    amp_scaling.UPDATE_SCALE: _update_scale,
}  # fmt: skip
"""Functions with operators of their own, which backends may not know, and the same without."""


def mutated_tensors(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Tensor]:
    """Yields the tensors that a call mutates: in-place targets and `out=`."""
    name = getattr(function, "__name__", "")
    if function in NEW_INSTEAD or (name.endswith("_") and not name.endswith("__")):
        targets = args[0] if args and isinstance(args[0], list | tuple) else args[:1]
        yield from (t for t in targets if isinstance(t, Tensor))
    if isinstance(kwargs.get("out"), Tensor):
        yield kwargs["out"]


def has_tensor_number(kwargs: dict[str, Any]) -> bool:
    """Returns whether a keyword that should be a number is a tensor."""
    return any(isinstance(kwargs.get(name), Tensor) for name in NUMBERS)


def unroll_foreach(
    function: Callable[..., Any], call: Callable[..., Any]
) -> Callable[..., Any] | None:
    """Returns a `_foreach_` function as one call per tensor; None for other functions."""
    name = getattr(function, "__name__", "")
    if not name.startswith("_foreach_"):
        return None
    single = name.removeprefix("_foreach_")
    if single == "norm":
        return lambda tensors, order=2, dtype=None: [
            torch.linalg.vector_norm(t, order, dtype=dtype) for t in tensors
        ]
    method = getattr(_T, single, None)
    if method is None:
        return None

    def each(*args: Any, **kwargs: Any) -> list[Any]:
        count = len(args[0])
        return [
            call(
                method,
                tuple(_at(a, i, count) for a in args),
                {k: _at(a, i, count) for k, a in kwargs.items()},
            )
            for i in range(count)
        ]

    return each


def _at(value: Any, i: int, count: int) -> Any:
    is_list = isinstance(value, list | tuple) and len(value) == count
    return value[i] if is_list else value

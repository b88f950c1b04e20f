"""The calls that random programs are made of, one table row per kind."""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.graph.programs import DTYPES, Call, Ref

Env = dict[str, Any]
Row = Callable[[st.DrawFn, Env, str, str], Call]


def draw_call(draw: st.DrawFn, env: Env, name: str) -> Call:
    """A call on some value of `env`; eager may refuse it."""
    x = draw(st.sampled_from(sorted(env)))
    return draw(st.sampled_from(KINDS))(draw, env, x, name)


def _dim(draw: st.DrawFn, x: Tensor) -> int:
    return draw(st.integers(-x.ndim, x.ndim - 1)) if x.ndim else 0


def _scalar(draw: st.DrawFn) -> Any:
    return draw(st.sampled_from((0, 1, 2, -3, 0.5, -1.25, True)))


def _other(draw: st.DrawFn, env: Env, x: str) -> Any:
    """A second operand: a number, or a value that broadcasts with the first."""
    if draw(st.booleans()):
        return _scalar(draw)
    fitting = []
    for name, value in sorted(env.items()):
        try:
            torch.broadcast_shapes(value.shape, env[x].shape)
        except RuntimeError:
            continue
        fitting.append(name)
    return Ref(draw(st.sampled_from(fitting)))


def _view(draw: st.DrawFn, env: Env, x: str, name: str) -> Call:
    value = env[x]
    d, e = _dim(draw, value), _dim(draw, value)
    n = value.shape[d] if value.ndim else 0
    if value.ndim == 0:
        return draw(st.sampled_from((
            Call(name, "unsqueeze", (Ref(x), 0)), Call(name, "expand", (Ref(x), 2, 3)),
            Call(name, "view", (Ref(x), 1)), Call(name, "detach", (Ref(x),)),
        )))  # fmt: skip
    index = (slice(None),) * (d % value.ndim)
    start = draw(st.integers(0, max(n - 1, 0)))
    choices = [
        Call(name, "transpose", (Ref(x), d, e)),
        Call(name, "movedim", (Ref(x), d, e)),
        Call(name, "unsqueeze", (Ref(x), d)),
        Call(name, "squeeze", (Ref(x), d)),
        Call(name, "squeeze", (Ref(x),)),
        Call(name, "detach", (Ref(x),)),
        Call(name, "view", (Ref(x), -1)),
        Call(name, "reshape", (Ref(x), -1)),
        Call(name, "flatten", (Ref(x), 0)),
        Call(name, "view", (Ref(x), tuple(value.shape))),
        Call(name, "reshape", (Ref(x), (*value.shape[::-1],))),
        Call(name, "expand", (Ref(x), *((2 if s == 1 else s) for s in value.shape))),
        Call(name, "expand", (Ref(x), 2, *value.shape)),
        Call(name, "narrow", (Ref(x), d, start, n - start)),
        Call(name, "operator.getitem", (Ref(x), (*index, slice(start, None, 2)))),
        Call(name, "operator.getitem", (Ref(x), (*index, start, ...))),
        Call(name, "operator.getitem", (Ref(x), (None, ..., slice(0, 2)))),
        Call(name, "select", (Ref(x), d, start)),
        Call(name, "permute", (Ref(x), *range(value.ndim - 1, -1, -1))),
        Call(name, "diagonal", (Ref(x),)),
        Call(name, "unfold", (Ref(x), d, 2, 1)),
        Call(name, "view_as", (Ref(x), Ref(x))),
    ]
    return draw(st.sampled_from(choices))


def _unary(draw: st.DrawFn, env: Env, x: str, name: str) -> Call:
    names = ["neg", "abs", "sign", "clone", "contiguous", "logical_not", "square", "sigmoid",
             "sin", "exp", "relu", "tanh", "floor", "isnan", "reciprocal", "sqrt"]  # fmt: skip
    return Call(name, draw(st.sampled_from(names)), (Ref(x),))


def _binary(draw: st.DrawFn, env: Env, x: str, name: str) -> Call:
    names = ["add", "sub", "mul", "div", "eq", "lt", "ge", "ne", "maximum", "logical_and",
             "bitwise_xor", "remainder", "floor_divide", "pow", "fmod", "__rsub__"]  # fmt: skip
    target = draw(st.sampled_from(names))
    settings: dict[str, Any] = {}
    if target in ("add", "sub") and draw(st.integers(0, 3)) == 0:
        settings = {"alpha": 2}
    if target == "div" and draw(st.booleans()):
        settings = {"rounding_mode": draw(st.sampled_from(("floor", "trunc")))}
    return Call(name, target, (Ref(x), _other(draw, env, x)), settings)


def _is_writable(x: Tensor) -> bool:
    """Whether a write is defined, and kept exact by functionalization.

    It is not defined where elements overlap, and functionalization rounds a write through an
    expanded view: the base becomes base + (new - base).
    """
    places = torch.zeros(x.shape, dtype=torch.int64)
    for d, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        places += (torch.arange(size) * stride).view(-1, *[1] * (x.ndim - d - 1))
    return places.unique().numel() == x.numel() and not hasattr(x, "through_expand")


def _in_place(draw: st.DrawFn, env: Env, x: str, name: str) -> Call:
    if not _is_writable(env[x]):
        return Call(name, "clone", (Ref(x),))
    other, number = _other(draw, env, x), _scalar(draw)
    d = _dim(draw, env[x])
    choices = [
        Call(name, "add_", (Ref(x), other)),
        Call(name, "mul_", (Ref(x), other)),
        Call(name, "sub_", (Ref(x), number)),
        Call(name, "fill_", (Ref(x), number)),
        Call(name, "zero_", (Ref(x),)),
        Call(name, "neg_", (Ref(x),)),
        Call(name, "clamp_", (Ref(x), -1, 2)),
        Call(name, "sigmoid_", (Ref(x),)),
    ]
    if env[x].is_contiguous():  # functionalization makes it so
        choices.append(Call(name, "masked_fill_", (Ref(x), Ref(_mask(env, x)), number)))
    if torch.empty_like(env[x]).stride() == env[x].stride():  # AOT Autograd closes gaps
        choices += [
            Call(name, "transpose_", (Ref(x), d, 0)),
            Call(name, "unsqueeze_", (Ref(x), d)),
        ]
    if isinstance(other, Ref):
        choices += [Call(name, "copy_", (Ref(x), other))] * 2
    if env[x].ndim:
        choices += [Call(name, "operator.setitem", (Ref(x), i, number)) for i in (0, slice(0, 1))]
    return draw(st.sampled_from(choices))


def _mask(env: Env, x: str) -> str:
    masks = [n for n, v in sorted(env.items()) if v.dtype is torch.bool]
    return next((n for n in masks if env[n].shape == env[x].shape), masks[0] if masks else x)


def _reduce(draw: st.DrawFn, env: Env, x: str, name: str) -> Call:
    d = _dim(draw, env[x])
    keep = draw(st.booleans())
    return draw(st.sampled_from((
        Call(name, "sum", (Ref(x),)),
        Call(name, "sum", (Ref(x), d), {"keepdim": keep}),
        Call(name, "mean", (Ref(x), d, keep)),
        Call(name, "amax", (Ref(x), d, keep)),
        Call(name, "any", (Ref(x), d, keep)),
        Call(name, "all", (Ref(x),)),
        Call(name, "prod", (Ref(x),)),
        Call(name, "cumsum", (Ref(x), d)),
        Call(name, "argmax", (Ref(x), d)),
        Call(name, "softmax", (Ref(x), d)),
    )))  # fmt: skip


def _combine(draw: st.DrawFn, env: Env, x: str, name: str) -> Call:
    other = _other(draw, env, x)
    d = _dim(draw, env[x])
    choices = [
        Call(name, "torch.cat", ([Ref(x), Ref(x)], d)),
        Call(name, "torch.stack", ([Ref(x), Ref(x)], d)),
        Call(name, "flip", (Ref(x), (d,))),
        Call(name, "roll", (Ref(x), 1, d)),
        Call(name, "tril", (Ref(x),)),
        Call(name, "torch.where", (Ref(_mask(env, x)), Ref(x), other)),
        Call(name, "masked_fill", (Ref(x), Ref(_mask(env, x)), 2)),
        Call(name, "clamp", (Ref(x), -1)),
        Call(name, "index_select", (Ref(x), d, Ref(x))),
        Call(name, "type_as", (Ref(x), other)),
    ]
    if env[x].ndim == 2:
        choices += [Call(name, "matmul", (Ref(x), other)), Call(name, "t", (Ref(x),))]
    return draw(st.sampled_from(choices))


def _convert(draw: st.DrawFn, env: Env, x: str, name: str) -> Call:
    return Call(name, "to", (Ref(x), draw(st.sampled_from(DTYPES))))


def _create(draw: st.DrawFn, env: Env, x: str, name: str) -> Call:
    shape = tuple(env[x].shape)
    return draw(st.sampled_from((
        Call(name, "torch.zeros", (shape,), {"dtype": env[x].dtype}),
        Call(name, "torch.full", (shape, 0.5)),
        Call(name, "torch.arange", (4,)),
        Call(name, "torch.tensor", ([1.0, -2.0, 3.0],)),
        Call(name, "torch.ones_like", (Ref(x),)),
        Call(name, "new_full", (Ref(x), (3,), 1)),
    )))  # fmt: skip


def _random(draw: st.DrawFn, env: Env, x: str, name: str) -> Call:
    p = draw(st.sampled_from((0.3, 0.5, 1.0)))
    if not env[x].is_floating_point():
        return Call(name, "torch.randint", (0, 5, tuple(env[x].shape)))
    return draw(st.sampled_from((
        Call(name, "torch.nn.functional.dropout", (Ref(x), p, True)),
        Call(name, "torch.rand", (tuple(env[x].shape),)),
        Call(name, "torch.rand_like", (Ref(x),)),
        Call(name, "torch.randn_like", (Ref(x),)),
        Call(name, "torch.randint", (0, 5, tuple(env[x].shape))),
        Call(name, "torch.bernoulli", (Ref(x),), {"p": 0.5}),
        Call(name, "clone", (Ref(x),)) if not _is_writable(env[x])
        else Call(name, "uniform_", (Ref(x), 0, 2)),
    )))  # fmt: skip


KINDS: tuple[Row, ...] = (
    *[_view] * 6, *[_unary] * 3, *[_binary] * 4, *[_in_place] * 5,
    _reduce, _reduce, _combine, _combine, _convert, _create, _random, _random,
)  # fmt: skip

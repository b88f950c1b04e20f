"""Calls whose results depend on sizes, for random programs; one table row per kind."""

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from torch import Tensor

from tests.graph.programs import Call, Ref, Size

Calls = list[Call]
Row = Callable[[str, Tensor, int, str], list[Calls]]


def draw_sized_call(draw: st.DrawFn, env: dict[str, Any], name: str) -> Calls:
    """One or more calls on some value of `env`; eager may refuse them."""
    x = draw(st.sampled_from(sorted(env)))
    value = env[x]
    dim = draw(st.integers(0, max(value.ndim - 1, 0)))
    return draw(st.sampled_from(draw(st.sampled_from(KINDS))(x, value, dim, name)))


def _call(name: str, target: str, *args: Any, **kwargs: Any) -> Calls:
    return [Call(name, target, args, kwargs)]


def _first(name: str, target: str, *args: Any, **kwargs: Any) -> Calls:
    """The first of several results."""
    calls = _call(f"{name}a", target, *args, **kwargs)
    return [*calls, Call(name, "operator.getitem", (Ref(f"{name}a"), 0))]


def _at(value: Tensor, dim: int, index: Any) -> tuple[Any, ...]:
    return (*[slice(None)] * dim, index)


def _reduce(x: str, value: Tensor, dim: int, name: str) -> list[Calls]:
    r = Ref(x)
    return [
        _call(name, "sum", r, dim, True),
        _call(name, "mean", r, dim, True),
        _call(name, "mean", r),
        _call(name, "amax", r, dim, True),
        _call(name, "amin", r, dim),
        _call(name, "var", r, dim),
        _call(name, "std", r),
        _call(name, "prod", r, dim),
        _call(name, "logsumexp", r, dim),
        _call(name, "norm", r),
        _first(name, "max", r, dim),
        _call(name, "softmax", r, dim),
        _call(name, "log_softmax", r, dim),
        _call(name, "torch.nn.functional.layer_norm", r, (Size(x, value.ndim - 1),)),
    ]


def _scan(x: str, value: Tensor, dim: int, name: str) -> list[Calls]:
    r = Ref(x)
    return [
        _call(name, "cumsum", r, dim),
        _call(name, "cumprod", r, dim),
        _call(name, "logcumsumexp", r, dim),
        _first(name, "torch.cummax", r, dim),
        _first(name, "torch.sort", r, dim),
        _call(name, "argsort", r, dim=dim, stable=True),
        _first(name, "topk", r, 1, dim),
    ]


def _scalar(x: str, value: Tensor, dim: int, name: str) -> list[Calls]:
    """Sizes as numbers."""
    r, n = Ref(x), Size(x, dim)
    summed = Call(f"{name}a", "sum", (r, dim))
    return [
        [summed, Call(name, "div", (Ref(f"{name}a"), n))],
        _call(name, "mul", r, Size(x, dim, "(1.0 / ({} + 1))")),
        _call(name, "mul", r, Size(x, dim, "({0} / ({0} + 1))")),
        _call(name, "div", r, Size(x, dim, "(({} + 1) ** 0.5)")),
        _call(name, "add", r, n),
        _call(name, "sub", r, Size(x, dim, "{} // 2")),
        _call(name, "mul", r, Size(x, dim, "({} * 2)")),
        _call(name, "remainder", r, Size(x, dim, "({} + 2)")),
        _call(name, "clamp", r, -1, n),
        _call(name, "pow", r, Size(x, dim, "({} % 3)")),
    ]


def _made(x: str, value: Tensor, dim: int, name: str) -> list[Calls]:
    """Tensors made of sizes, beside the value."""
    last = value.ndim - 1
    n, own = Size(x, last), Ref(f"{name}a")

    def beside(target: str, *args: Any, then: str = "add") -> Calls:
        return [Call(own.name, target, args), Call(name, then, (Ref(x), own))]

    return [
        beside("torch.arange", n),
        beside("torch.arange", Size(x, last, "{} * 2, 0, -2"), then="mul"),
        beside("torch.ones", n),
        beside("torch.full", (n,), Size(x, last, "{} / 4")),
        beside("torch.eye", n),
        beside("new_ones", Ref(x), (n,)),
        beside("torch.linspace", 0, 1, n),
        _call(name, "tril", Ref(x)),
        _call(name, "triu", Ref(x), 1),
        _call(name, "torch.nn.functional.pad", Ref(x), (1, n)),
        _call(name, "torch.nn.functional.pad", Ref(x), (2, 1), "constant", 0.5),
    ]


def _shaped(x: str, value: Tensor, dim: int, name: str) -> list[Calls]:
    r, last = Ref(x), value.ndim - 1
    first = Size(x, 0)
    return [
        _call(name, "reshape", r, -1),
        _call(name, "flatten", r, 0, 1),
        _call(name, "flatten", r, 1),
        _call(name, "reshape", r, first, -1),
        _call(name, "reshape", r, Size(x, last), first),
        _call(name, "reshape", r, Size(x, 0, "{} * 2"), -1),
        _call(name, "reshape", r, -1, 2),
        _call(name, "unflatten", r, dim, (2, -1)),
        _call(name, "transpose", r, 0, last),
        _call(name, "expand", r, 2, *[-1] * value.ndim),
        [
            Call(f"{name}a", "sum", (r, dim, True)),
            Call(name, "expand", (Ref(f"{name}a"), *(Size(x, d) for d in range(value.ndim)))),
        ],
        _call(name, "repeat", r, *[2] * value.ndim),
        _call(name, "repeat_interleave", r, 2, dim),
        _call(name, "torch.cat", [r, r], dim),
        _call(name, "torch.stack", [r, r], dim),
        _call(name, "flip", r, (dim,)),
        _call(name, "roll", r, 1, dim),
        _call(name, "roll", r, Size(x, dim, "{} // 2"), dim),
        _call(name, "unfold", r, dim, 2, 1),
        _call(name, "diagonal", r),
    ]


def _indexed(x: str, value: Tensor, dim: int, name: str) -> list[Calls]:
    r = Ref(x)
    half, own = Size(x, dim, "{} // 2"), Ref(f"{name}a")
    parts = [
        -1, 0, slice(1, None), slice(None, -1), slice(None, 2), slice(None, None, 2),
        slice(half, None), slice(None, half), slice(-3, None),
    ]  # fmt: skip
    steps = Call(own.name, "torch.arange", (Size(x, dim, "{} - 1, -1, -1"),))
    order = Call(own.name, "argsort", (r,), {"dim": dim, "stable": True})
    return [
        *(_call(name, "operator.getitem", r, _at(value, dim, part)) for part in parts),
        [steps, Call(name, "index_select", (r, dim, own))],
        [steps, Call(name, "operator.getitem", (r, _at(value, dim, own)))],
        [order, Call(name, "gather", (r, dim, own))],
        _call(name, "narrow", r, dim, half, half),
        _first(name, "torch.split", r, 2, dim),
        _first(name, "torch.chunk", r, 2, dim),
    ]


def _contracted(x: str, value: Tensor, dim: int, name: str) -> list[Calls]:
    r, t = Ref(x), Ref(f"{name}a")
    turned = Call(t.name, "transpose", (r, max(value.ndim - 2, 0), value.ndim - 1))
    functional = "torch.nn.functional."
    return [
        [turned, Call(name, "matmul", (r, t))],
        [turned, Call(name, "matmul", (t, r))],
        _call(name, functional + "scaled_dot_product_attention", r, r, r),
        *(
            _call(name, functional + f"conv{n}d", r, Ref(f"w{n}"), None, stride, padding)
            for n in (1, 2)
            for stride, padding in ((1, 1), (1, 0), (2, 1))
        ),
        _call(name, functional + "conv_transpose1d", r, Ref("w1")),
        _call(name, functional + "avg_pool1d", r, 2),
        _call(name, functional + "max_pool1d", r, 3, 1, 1),
        _call(name, functional + "avg_pool2d", r, 2),
        _call(name, functional + "max_pool2d", r, 2),
        _call(name, functional + "adaptive_avg_pool1d", r, 1),
        _call(name, functional + "adaptive_avg_pool2d", r, 2),
        _call(name, functional + "interpolate", r, None, 2),
    ]


KINDS: tuple[Row, ...] = (
    _reduce, _reduce, _scan, _scalar, _made, _shaped, _shaped, _indexed, _indexed, _contracted,
    _contracted,
)  # fmt: skip

"""Backends of another package, for the tests: one that is right and fast, and many that are not.

Each stands for `slow` with a cheap function that gives, or nearly gives, the same results, so it
would win if nobody looked.
"""

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

ENTRY_POINTS = (
    "good",
    "wrong_numbers",
    "not_a_number",
    "wrong_dtype",
    "wrong_alias",
    "wrong_strides",
    "other_gradients",
    "mutates",
    "writes_weight",
    "baked_in",
    "detaches",
    "reuses_memory",
    "raises_at_compile",
    "raises_at_third_call",
    "exits",
    "hangs",
    "crashes",
    "waits",
    "good_below_20",
    "wrong_elsewhere",
)

state = {"broken": False}


def slow(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """(2x + 1 + w, a copy of x), the long way."""
    y = x + w
    for _ in range(60):
        y = torch.maximum(y, x + w)
    return (y - w) * 2 + 1 + w, torch.minimum(x, x.abs() + 1)


def fast(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2 + 1 + w, x.clone()


class Slow(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.rand(40, 50))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return slow(x, self.w)


Function = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _ordered(inputs: Sequence[Any], function: Function) -> Callable[..., Any]:
    """Dynamo's order of inputs is not fixed: the weight is the one that requires gradients.

    Symbols among the inputs are left out.
    """
    first, _ = (x for x in inputs if isinstance(x, Tensor))
    weight_first = first.requires_grad

    def run(*args: Any) -> tuple[Tensor, Tensor]:
        x, w = (arg for arg in args if isinstance(arg, Tensor))
        return function(w, x) if weight_first else function(x, w)

    return run


def _backend(function: Function) -> Callable[..., Any]:
    return lambda gm, inputs: _ordered(inputs, function)


def _good(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    if state["broken"]:
        raise RuntimeError("the licence has expired")
    return fast(x, w)


class _Transposed(torch.autograd.Function):
    """`fast`, with gradients whose strides are not those of eager's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return fast(x, w)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> tuple[Tensor, Tensor]:
        first, second = tangents
        return first * 2 + second, first.t().contiguous().t()


def _mutating(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    results = fast(x, w)
    x.zero_()
    return results


def _writing_weight(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    results = fast(x, w)
    w.data.add_(1)
    return results


good = _backend(_good)
wrong_numbers = _backend(lambda x, w: (fast(x, w)[0] * 1.01, x.clone()))
not_a_number = _backend(lambda x, w: (fast(x, w)[0].fill_(torch.nan), x.clone()))
wrong_dtype = _backend(lambda x, w: (fast(x, w)[0].double(), x.clone()))
wrong_alias = _backend(lambda x, w: (fast(x, w)[0], x))
wrong_strides = _backend(lambda x, w: (fast(x, w)[0].t().contiguous().t(), x.clone()))
other_gradients = _backend(lambda x, w: _Transposed.apply(x, w))
detaches = _backend(lambda x, w: fast(x.detach(), w.detach()))
mutates = _backend(_mutating)
writes_weight = _backend(_writing_weight)


def baked_in(gm: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
    results = [r.detach() for r in gm(*inputs)]
    return lambda *_: [r.clone() for r in results]


def reuses_memory(gm: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
    first, second = torch.empty(40, 50), torch.empty(40, 50)

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        results = fast(x, w)
        return first.copy_(results[0]), second.copy_(results[1])

    return _ordered(inputs, function)


def raises_at_compile(gm: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
    raise NotImplementedError("no such chip")


def raises_at_third_call(gm: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
    calls = []

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("the third call")
        return fast(x, w)

    return _ordered(inputs, function)


def exits(gm: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
    os._exit(3)


def hangs(gm: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
    with open(os.environ["PLANTED_MARK"], "w") as file:
        file.write("it began")
    while True:
        time.sleep(1)


def waits(gm: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compiles until somebody removes a file; says in another one that it began."""
    with open(os.environ["PLANTED_MARK"], "a") as file:
        file.write(f"{os.getpid()}\n")
    while os.path.exists(os.environ["PLANTED_GATE"]):
        time.sleep(0.01)
    return good(gm, inputs)


def good_below_20(gm: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Assumes that sizes are small, as a compiler may, and is wrong where they are not."""
    small = all(x < 20 for x in inputs if isinstance(x, torch.SymInt))

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y, z = _good(x, w)
        return (y, z) if small and len(x) < 20 else (y + 1, z)

    return _ordered(inputs, function)


def wrong_elsewhere(gm: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Is right for the sizes that it was compiled for alone."""
    lengths = [len(x) for x in inputs if isinstance(x, Tensor) and not x.requires_grad]

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y, z = fast(x, w)
        return y + (len(x) != lengths[0]), z

    return _ordered(inputs, function)


def crashes(gm: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
    return lambda *_: ctypes.string_at(0)

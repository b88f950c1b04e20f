"""Backends with something wrong, to be found out by `dynamo-backends conformance`."""

import operator
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Run = Callable[..., Any]

SLOW_S = 0.5


def right(captured: Any, inputs: Any) -> Run:
    run: Run = captured.forward
    return run


def wrong(captured: Any, inputs: Any) -> Run:
    """Floats are off by a hundredth."""
    return lambda *args: [
        x * 1.01 if isinstance(x, Tensor) and x.is_floating_point() else x for x in captured(*args)
    ]


def single(captured: Any, inputs: Any) -> Run:
    """Float64 is no more exact than float32."""
    return lambda *args: [
        x.float().double() if isinstance(x, Tensor) and x.dtype is torch.float64 else x
        for x in captured(*args)
    ]


def raising(captured: Any, inputs: Any) -> Run:
    raise RuntimeError("no licence")


def raising_later(captured: Any, inputs: Any) -> Run:
    def run(*args: Any) -> Any:
        assert not args, "inputs are not supported"

    return run


def hanging(captured: Any, inputs: Any) -> Run:
    time.sleep(3600)
    raise AssertionError("nobody waits so long")


def crashing(captured: Any, inputs: Any) -> Run:
    os.abort()


_compiled = 0


def crashing_at_last(captured: Any, inputs: Any) -> Run:
    """As if each compilation destroyed a little memory."""
    global _compiled
    _compiled += 1
    if _compiled > 4:
        os.abort()
    return right(captured, inputs)


def slow(captured: Any, inputs: Any) -> Run:
    time.sleep(SLOW_S)
    return right(captured, inputs)


def forgetful(captured: Any, inputs: Any) -> Run:
    """Changes copies of its inputs, rather than these."""

    def run(*args: Any) -> Any:
        return captured(*(x.clone() if isinstance(x, Tensor) else x for x in args))

    return run


def stale(captured: Any, inputs: Any) -> Run:
    """Keeps the weights that it has seen first."""
    kept = {i: x.detach().clone() for i, x in enumerate(inputs) if isinstance(x, nn.Parameter)}

    def run(*args: Any) -> Any:
        return captured(*(kept.get(i, x) for i, x in enumerate(args)))

    return run


def static(captured: Any, inputs: Any) -> Run:
    """Serves the sizes of its first call."""
    seen: list[Any] = []

    def run(*args: Any) -> Any:
        sizes = [x.shape for x in args if isinstance(x, Tensor)]
        seen.append(sizes)
        if sizes != seen[0]:
            raise RuntimeError(f"compiled for {seen[0]}")
        return captured(*args)

    return run


def seedless(captured: Any, inputs: Any) -> Run:
    """Has random numbers of its own."""

    def run(*args: Any) -> Any:
        torch.rand(())
        return captured(*args)

    return run


def dropping_casts(captured: Any, inputs: Any) -> Run:
    """Leaves out a cast to a smaller type and back."""
    for node in captured.graph.nodes:
        before = node.args[0] if node.args else None
        if node.target == "float" and getattr(before, "target", "") in ("half", "bfloat16"):
            node.replace_all_uses_with(before.args[0])
    captured.recompile()
    return right(captured, inputs)


def cancelling(captured: Any, inputs: Any) -> Run:
    """Replaces `x * c / c` by x."""
    for node in captured.graph.nodes:
        before = node.args[0] if node.args else None
        pair = (node.target, getattr(before, "target", None)) == (operator.truediv, operator.mul)
        if pair and before.args[1] == node.args[1]:
            node.replace_all_uses_with(before.args[0])
    captured.recompile()
    return right(captured, inputs)


def crashing_on_tangents(captured: Any, inputs: Any) -> Run:
    if any(node.target == "tan" for node in captured.graph.nodes):
        os.abort()
    return right(captured, inputs)


def hiding_zeros(captured: Any, inputs: Any) -> Run:
    """As an absolute tolerance would allow: small numbers are zero."""

    def small(x: Tensor) -> Tensor:
        return torch.where(x.abs() < 1e-5, 0.0, x) if x.is_floating_point() else x

    return lambda *args: [small(x) for x in captured(*args)]

"""Comparing a lowered function with eager, by the rule of PyTorch's benchmark runners."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dynamo_backends._torch_private import meets_benchmark_accuracy
from tests.xla.harness import run


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.double()
    return value


def assert_like_eager(fn: Callable[..., Any], *args: Any) -> None:
    """Shapes, dtypes and values of `fn(*args)` through XLA are those of eager.

    Integers must be equal, floating-point results as near to a float64 run as eager's are.
    """
    expected = pytree.tree_leaves(fn(*args))
    precise = pytree.tree_leaves(fn(*pytree.tree_map(_widen, args)))
    results = run(fn, *args)
    assert len(results) == len(expected)
    for result, reference, exact in zip(results, expected, precise, strict=True):
        assert result.shape == reference.shape
        assert result.dtype == reference.dtype
        if reference.is_floating_point():
            tolerance = 1e-3 if reference.dtype.itemsize < 4 else 1e-5
            assert meets_benchmark_accuracy(reference, result, exact, equal_nan=True, tol=tolerance)
        else:
            torch.testing.assert_close(result, reference, rtol=0, atol=0)


def gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The gradients of all floating-point arguments of `fn`, for a fixed cotangent."""

    def pulled(*args: torch.Tensor) -> Any:
        places = [i for i, x in enumerate(args) if x.is_floating_point()]

        def of_floats(*floats: torch.Tensor) -> torch.Tensor:
            filled = list(args)
            for i, x in zip(places, floats, strict=True):
                filled[i] = x
            return fn(*filled)

        out, pull = torch.func.vjp(of_floats, *(args[i] for i in places))
        ramp = torch.arange(out.numel(), dtype=torch.float64).reshape(out.shape)
        return pull(torch.cos(ramp).to(out.dtype))

    return pulled

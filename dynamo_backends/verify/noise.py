"""Measures how rounding affects a result: replays a graph with errors in the last places.

Where a result follows from the inputs, such errors change it a little. Where it does not, they
change it as much as another order of summation would: a difference of nearly equal sums, an index
of one of two nearly equal elements, the sign of a gradient that is zero but for rounding.

Only what kernels compute in different ways has errors. A sum of two numbers has none, and a product
or a quotient of two numbers has one where it is rounded at all, because a kernel may compute the
product and a following sum at once. So `(x + c) - c` is what eager says it is.

Where torch allows GPUs TF32, kernels for the same product differ by as much as that rounds its
factors: eager's may not use it where another's does.
"""

from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends.graph.eager_calls import call_in_eager
from dynamo_backends.graph.precision import ROUNDING, allows_tf32
from dynamo_backends.verify.mismatch import is_inexact
from dynamo_backends.verify.reference import (
    CASTS,
    is_add_or_sub,
    is_exact,
    is_rounded_once,
    widen_to_float64,
)

aten = torch.ops.aten

_UNITS = 16  # in the last place; kernels that approximate, or sum in float32, are off by so much
_UNITS_OF_HALVES = 2
_UNITS_OF_PRODUCTS = 1  # of two numbers; these are rounded once
_REDUCED = 2**-7  # relative, where a user admits bfloat16

UNWRITTEN = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_permuted.default,
        aten.empty_strided.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)
"""Their results are what was in memory before, which has no right contents."""

# Which of several equal elements their indices name is open.
_OPEN = frozenset(
    {
        aten.argsort.default,
        aten.kthvalue.default,
        aten.median.dim,
        aten.mode.default,
        aten.nanmedian.dim,
        aten.sort.default,
        aten.sort.stable,
        aten.topk.default,
    }
)


class Noise:
    """Computes calls as `reference.Call`, with a rounding-sized error in each result.

    Args:
        seed: Seed of the errors.
        reduced: Whether they are those of bfloat16.
    """

    def __init__(self, seed: int, reduced: bool = False):
        self._seed = seed
        self._reduced = reduced
        self._generators: dict[torch.device, torch.Generator] = {}

    def __call__(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Computes a call and disturbs its result (see `reference.Call`)."""
        if allows_tf32(node.target):
            args = tuple(self._rounded(a) for a in args)
        value = self._computed(node, args, kwargs)
        if node.target in UNWRITTEN:
            return self._filled(value)
        if node.target in CASTS:  # what integers do not hold depends on the processor
            value = self._without_overflow(value, args[0])
        if node.target in _OPEN and not kwargs.get("stable"):
            value = self._among_equals(node, value, args, kwargs)
        if is_exact(node):
            return value
        if is_rounded_once(node):
            return self._rounded_once(node, value, args, kwargs)
        if isinstance(value, list | tuple):
            return type(value)(self._disturbed(v, _UNITS) for v in value)
        return self._disturbed(value, _UNITS)

    def _computed(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Computes a call; in `a + alpha * b`, the product is disturbed first."""
        alpha = kwargs.get("alpha", 1)
        if is_add_or_sub(node) and alpha not in (1, -1) and isinstance(args[1], Tensor):
            product = args[1] * alpha
            if is_inexact(product):
                args = args[0], self._disturbed(product, _UNITS_OF_PRODUCTS)
                kwargs = {k: v for k, v in kwargs.items() if k != "alpha"}
        return call_in_eager(node.target, args, kwargs)

    def _rounded_once(
        self, node: fx.Node, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Returns a sum as it is, a product with an error where it is rounded.

        In float16 and bfloat16 both have errors: kernels may compute several operators in float32.
        """
        if self._reduced or not isinstance(value, Tensor) or not is_inexact(value):
            return self._disturbed(value, _UNITS_OF_PRODUCTS)
        if value.dtype.to_real().itemsize < 4:
            return self._disturbed(value, _UNITS_OF_PRODUCTS)
        if is_add_or_sub(node):
            return value
        wide = node.target(*map(widen_to_float64, args), **kwargs)  # type: ignore[operator]
        disturbed = self._disturbed(value, _UNITS_OF_PRODUCTS)
        if value.dtype in (torch.float64, torch.complex128):
            return disturbed
        return torch.where(wide == value, value, disturbed)

    def _uniform(self, shape_of: Tensor, most: float, dtype: torch.dtype) -> Tensor:
        """Numbers between -most and most, in the order of memory of a tensor."""
        device = shape_of.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        empty = torch.empty_like(shape_of, dtype=dtype)
        return empty.uniform_(-most, most, generator=self._generators[device])

    def _disturbed(self, value: Any, units: int) -> Any:
        if not isinstance(value, Tensor) or not is_inexact(value) or value.dtype.itemsize < 2:
            return value
        real = value.dtype.to_real()
        if real.itemsize < 4:
            units = min(units, _UNITS_OF_HALVES)
        most = units * torch.finfo(real).eps
        if self._reduced:
            most = max(most, _REDUCED)
        return value * (1 + self._uniform(value, most, real))

    def _rounded(self, value: Any) -> Any:
        """Disturbs a float32 CUDA factor as TF32 rounding may; returns others unchanged."""
        if not isinstance(value, Tensor) or not _is_on_gpu(value):
            return value
        return value * (1 + self._uniform(value, ROUNDING, torch.float32))

    def _filled(self, value: Tensor) -> Tensor:
        noise = self._uniform(value, 1.0, torch.float32)
        return (noise > 0) if value.dtype == torch.bool else (noise * 8).to(value.dtype)

    def _without_overflow(self, value: Tensor, given: Tensor) -> Tensor:
        """Replaces a cast's results by noise where the input overflows the integer type."""
        to_integers = not is_inexact(value) and value.dtype != torch.bool
        if not to_integers or not given.is_floating_point():
            return value
        limits, wide = torch.iinfo(value.dtype), given.double()
        fits = (wide > limits.min - 1.0) & (wide < limits.max + 1.0)
        return torch.where(fits, value, self._uniform(given, 1.0, torch.float32) > 0)

    def _among_equals(
        self, node: fx.Node, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Returns the results, with indices of other elements where several are equal."""
        given = args[0]
        if given.is_floating_point():
            finite = given.double().nan_to_num(0.0, 0.0, 0.0).abs()
            most = 1e-12 * float(finite.max()) if given.numel() else 0.0
        else:
            most = 0.25
        apart = given.double() + self._uniform(given, most, torch.float64)
        found = node.target(apart, *args[1:], **kwargs)  # type: ignore[operator]
        return found if isinstance(found, Tensor) else type(value)((value[0], found[1]))


def _is_on_gpu(value: Tensor) -> bool:
    return value.device.type == "cuda" and value.dtype == torch.float32

"""Calls of an operator of the database, in eager and compiled, and what is wrong with results."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dynamo_backends._torch_private.testing import BinaryUfuncInfo, OpInfo, UnaryUfuncInfo
from dynamo_backends.conformance.operators.database import CHOICES, INDICES_ALONG, UNINITIALISED
from dynamo_backends.conformance.operators.extremes import extreme_difference
from dynamo_backends.verify import describe_difference

SEED = 7

PRECISION = 1e-9
"""Of results and gradients in float64, relative to the largest element of each."""


class Call:
    """Calls of one operator on some samples, as a function of all values in them.

    Args:
        op: The operator.
        samples: Those that eager accepts are used.
        extremes: They hold extreme values, which are judged one by one.
    """

    def __init__(self, op: OpInfo, samples: Sequence[Any], extremes: bool = False):
        self.op = op
        self.extremes = extremes
        self.samples: list[Any] = []
        self._parts: list[tuple[int, Any]] = []
        self.flat: list[Any] = []
        for sample in samples:
            flat, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
            if eager_results(functools.partial(self._one, spec=spec), flat) is not None:
                self.samples.append(sample)
                self._parts.append((len(flat), spec))
                self.flat += flat

    def _one(self, values: list[Any], spec: Any) -> list[Any]:
        input, args, kwargs = pytree.tree_unflatten(values, spec)
        return pytree.tree_leaves(self.op.op(input, *args, **kwargs))

    def __call__(self, values: list[Any]) -> list[Any]:
        """Returns all results, one after the other."""
        results = []
        start = 0
        for count, spec in self._parts:
            results += self._one(values[start : start + count], spec)
            start += count
        return results

    def eager(self) -> list[Any]:
        """Returns eager's results."""
        results = eager_results(self, self.flat)
        assert results is not None
        return results

    def compiled(self, compiler: Any, **options: Any) -> list[Any]:
        """Compiles the calls with a backend, and returns their results."""
        torch._dynamo.reset()
        torch.manual_seed(SEED)
        function = torch.compile(lambda values: self(values), backend=compiler, **options)
        found: list[Any] = function(clone(self.flat))
        return found


def eager_results(
    call: Callable[[list[Any]], list[Any]], flat: list[Any], seed: int = SEED
) -> list[Any] | None:
    """Returns a function's results; None if it raises."""
    torch.manual_seed(seed)
    with contextlib.suppress(Exception):
        return call(clone(flat))
    return None


def draws(call: Call) -> bool:
    """Returns whether an operator draws random numbers: results depend on the seed."""
    first, other = (eager_results(call, call.flat, seed) for seed in (SEED, SEED + 1))
    return first is not None and other is not None and not _equal(first, other)


def _equal(first: list[Any], second: list[Any]) -> bool:
    first, second = dense(first), dense(second)
    return describe_difference(first, second, first) is None


def shapes(values: list[Any]) -> list[Any]:
    """Replaces each tensor by its shape and dtype."""
    return [(x.shape, x.dtype) if isinstance(x, torch.Tensor) else x for x in values]


def _named(sample: Any, name: str, index: torch.Tensor) -> torch.Tensor:
    """Returns the elements that indices along `dim` name."""
    place = INDICES_ALONG[name]
    dim = sample.args[place] if len(sample.args) > place else sample.kwargs.get("dim", -1)
    keep = index.ndim == sample.input.ndim
    named = sample.input.gather(dim, index if keep else index.unsqueeze(dim))
    return named if keep else named.squeeze(dim)


def describe_mismatch(call: Call, expected: list[Any], results: list[Any]) -> str | None:
    """Describes how results differ from eager's; None if they are as accurate."""
    name = call.op.name
    if name in UNINITIALISED:
        expected, results = shapes(expected), shapes(results)
        return None if expected == results else f"{results} instead of {expected}"
    expected, results = dense(expected), dense(results)
    precise = eager_results(call, [widen(x) for x in call.flat])
    precise = expected if precise is None else dense(precise)
    if [getattr(p, "shape", None) for p in precise] != [
        getattr(e, "shape", None) for e in expected
    ]:
        precise = expected
    stable = call.samples[0].kwargs.get("stable", False)
    if name in INDICES_ALONG and not stable:
        expected, results, precise = (
            [*values, _named(call.samples[0], name, index)]
            for *values, index in (expected, results, precise)
        )
        precise = [widen(x) for x in precise]
    if call.extremes:
        signs = isinstance(call.op, UnaryUfuncInfo | BinaryUfuncInfo) and name not in CHOICES
        return extreme_difference(expected, results, precise, signs)
    return describe_difference(expected, results, precise) or far_apart(expected, results)


def far_apart(expected: Sequence[Any], results: Sequence[Any]) -> str | None:
    """Returns what is less exact than float64 should be, in words."""
    for i, (e, r) in enumerate(zip(expected, results, strict=True)):
        if not isinstance(e, torch.Tensor) or not e.numel():
            continue
        if e.dtype not in (torch.float64, torch.complex128):
            continue
        finite = e.isfinite() & r.isfinite()
        if not bool(finite.any()):
            continue
        worst = (e - r)[finite].abs().max().item()
        largest = max(1.0, e[finite].abs().max().item())
        if worst > PRECISION * largest:
            return f"output {i} differs from eager by {worst:.3e} in float64, of {largest:.3e}"
    return None


def clone(flat: list[Any]) -> list[Any]:
    """Copies tensors, also in containers."""
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in flat]


_WIDER = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.complex64: torch.complex128,
}


def widen(value: Any) -> Any:
    """Returns a copy in float64; so are dtypes."""
    if isinstance(value, torch.dtype):
        return _WIDER.get(value, value)
    if isinstance(value, torch.Tensor):
        return value.to(_WIDER.get(value.dtype, value.dtype), copy=True)
    return value


def dense(values: list[Any]) -> list[Any]:
    """Converts tensors of sparse and other layouts to strided ones."""
    return [
        x.to_dense() if isinstance(x, torch.Tensor) and x.layout is not torch.strided else x
        for x in values
    ]

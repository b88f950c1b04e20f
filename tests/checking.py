"""Compares compiled functions with eager: values, dtypes, strides, aliases and mutations."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

import dynamo_backends
from dynamo_backends import GraphReport
from dynamo_backends.verify import difference


def widen(value: Any) -> Any:
    """Floating-point tensors and modules in float64."""
    if isinstance(value, torch.nn.Module):
        return copy.deepcopy(value).double()
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.double()
    return value


def copy_inputs(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies that keep strides and storage offsets."""
    return tuple(copy.deepcopy(x) for x in inputs)


def check(
    fn: Callable[..., Any],
    *inputs: Any,
    ops_in_eager: int | None = 0,
    fullgraph: bool = True,
    dynamic: bool | None = None,
    backend: str = "openxla",
    **options: Any,
) -> list[GraphReport]:
    """Compiles `fn` and compares one call with eager.

    Args:
        fn: Function or module.
        inputs: Its inputs; each side gets copies.
        ops_in_eager: How many operators may run in eager; None: any number.
        fullgraph: Whether Dynamo must capture it whole.
        dynamic: As for `torch.compile`.
        backend: Name of the backend.
        options: Of the backend.

    Returns:
        The reports of the compiled graphs.
    """
    ours, theirs, precise = (copy_inputs(inputs) for _ in range(3))
    compiler = dynamo_backends.compiler(backend, **options)
    compiled = torch.compile(fn, backend=compiler, fullgraph=fullgraph, dynamic=dynamic)
    with dynamo_backends.record() as reports:
        torch.manual_seed(11)
        results = compiled(*ours)
    torch.manual_seed(11)
    expected = fn(*theirs)
    reference = None
    if not any(t.dtype in (torch.float64, torch.complex128) for t in tensors(expected)):
        torch.manual_seed(11)
        reference = widen(fn)(*(widen(x) for x in precise))
    same(expected, results, expected if reference is None else reference)
    same(theirs, ours, theirs)
    assert aliases(results, ours) == aliases(expected, theirs)
    assert reports, "nothing was compiled"
    if ops_in_eager is not None:
        eager = [f for r in reports for f in r.fallbacks]
        assert sum(f.count for f in eager) == ops_in_eager, eager
    assert not any(r.runtime_fallbacks for r in reports), reports
    return reports


def tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def same(expected: Any, results: Any, precise: Any) -> None:
    """Asserts equal structure, values as accurate as eager's, equal dtypes and stride order."""
    flat, spec = pytree.tree_flatten(expected)
    flat_results, result_spec = pytree.tree_flatten(results)
    assert spec == result_spec
    wrong = difference(flat, flat_results, pytree.tree_leaves(precise))
    assert wrong is None, wrong
    for e, r in zip(flat, flat_results, strict=True):
        if isinstance(e, torch.Tensor) and e.numel():
            assert e.stride() == r.stride(), f"strides {r.stride()} instead of {e.stride()}"
            assert e.requires_grad == r.requires_grad


def aliases(results: Any, inputs: Any) -> list[tuple[int, ...]]:
    """For each output: which inputs (from 0) and outputs (after them) share its storage."""
    everything = [*tensors(inputs), *tensors(results)]
    storages = [t.untyped_storage().data_ptr() if t.numel() else object() for t in everything]
    return [
        tuple(i for i, s in enumerate(storages) if s == storage)
        for storage in storages[len(tensors(inputs)) :]
    ]

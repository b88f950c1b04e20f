"""Compares a compiled graph with eager, against a float64 reference."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends.graph.graph import copy_graph


def snapshot_rng() -> tuple[Tensor, list[Tensor]]:
    """The state of torch's CPU and CUDA generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), cuda


def restore_rng(state: tuple[Tensor, list[Tensor]]) -> None:
    """Puts back what `snapshot_rng` returned."""
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])


def run_verified(
    run: Callable[[list[Any]], Sequence[Any]], module: fx.GraphModule, args: list[Any]
) -> tuple[Sequence[Any], Sequence[Any], str | None]:
    """Runs a compiled graph and its eager original on the same inputs and random numbers.

    Args:
        run: The compiled graph; it may clear the list it is given.
        module: The eager original, functional.
        args: Inputs of the graph.

    Returns:
        The compiled results, the eager ones, and what is wrong with the former (None: nothing).
    """
    before = snapshot_rng()
    results = run(list(args))
    after = snapshot_rng()
    try:
        restore_rng(before)
        expected = module(*args)
        restore_rng(before)
        precise = in_float64(module)(*[widen(a) for a in args])
    finally:
        restore_rng(after)
    return results, expected, difference(expected, results, precise)


def difference(
    expected: Sequence[Any], results: Sequence[Any], precise: Sequence[Any]
) -> str | None:
    """What distinguishes results from eager's, in words; None if they are as accurate.

    Args:
        expected: Eager's results.
        results: The results in question.
        precise: The same in float64.
    """
    if len(expected) != len(results):
        return f"{len(results)} outputs instead of {len(expected)}"
    for i, (e, r, p) in enumerate(zip(expected, results, precise, strict=True)):
        if not isinstance(e, Tensor):
            if e != r:
                return f"output {i} is {r!r} instead of {e!r}"
            continue
        if e.dtype != r.dtype or e.shape != r.shape:
            return f"output {i} is {r.dtype}{list(r.shape)} instead of {e.dtype}{list(e.shape)}"
        if e.is_floating_point() or e.is_complex():
            if not private.same(e, r, p, equal_nan=True, log_error=lambda *_, **__: None):
                wide = torch.promote_types(e.dtype, torch.float64)
                worst = (e.to(wide) - r.to(wide)).abs().max()
                return f"output {i} differs from eager by up to {worst:.3e}"
        elif not torch.equal(e, r):
            return f"output {i} differs from eager in {int((e != r).sum())} elements"
    return None


def in_float64(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a functional graph that computes every floating-point value in float64."""
    graph = copy_graph(module.graph)
    for node in graph.nodes:
        if node.op in ("call_function", "call_method"):
            node.args = _map_dtypes(node.args)
            node.kwargs = _map_dtypes(node.kwargs)
    return fx.GraphModule(module, graph)


_WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


def widen(value: Any) -> Any:
    """A tensor in the precision of the reference; anything else as it is."""
    if isinstance(value, Tensor) and value.dtype in _WIDER:
        return value.to(_WIDER[value.dtype])
    return value


def _map_dtypes(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return _WIDER.get(value, value)
    if isinstance(value, list | tuple):
        return type(value)(map(_map_dtypes, value))
    if isinstance(value, dict):
        return {k: _map_dtypes(v) for k, v in value.items()}
    return value

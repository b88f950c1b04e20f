"""Chooses the decompositions for Inductor: its own, except for images and narrow integers.

On CPUs some operators on images are kept whole (`native`), and batch norm is decomposed in a way
of our own (`norms`), because Inductor's loops for them are slow. Of dropout only the mask is drawn,
so that it can be drawn before the step runs, where all other draws are made (see
`aot.step.program.draws`).
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends.graph.call_decomposition import decompose_call, replace_call
from dynamo_backends.graph.call_tracing import CallTraceCache
from dynamo_backends.graph.decomposition_tables import checked_decomposition_table
from dynamo_backends.graph.random_draws import decompose_dropout
from dynamo_backends.inductor import norms
from dynamo_backends.interface.errors import LoweringError
from dynamo_backends.kernels.patterns import (
    CONVOLUTION_BACKWARD,
    POOLS,
    is_image_on_cpu,
    keep_stride_order,
)

aten = torch.ops.aten


CHECKED = frozenset({aten.max_unpool2d.default, aten.max_unpool3d.default})
"""Inductor's rules take negative positions, which eager refuses. Ours check them."""


def decompose_for_inductor(graph: fx.Graph) -> None:
    """Decomposes the calls of a graph for concrete shapes as Inductor wants it, in place."""
    table, traces = private.inductor_decompositions(), CallTraceCache()
    with torch.no_grad(), private.keeping_unused_draws():
        for node in list(graph.nodes):
            gone = node._erased  # with one that had read it
            if node.op == "call_function" and node.target in table and not gone:
                with contextlib.suppress(LoweringError):  # rules that decline: Inductor lowers it
                    decompose_call(node, table, traces)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Returns for each operator a function that may answer `NotImplemented`."""
    table = private.inductor_decompositions()
    ways = {**POOLS, **_NORMS, aten.convolution_backward.default: _convolution_backward}
    images = {operator: _choice(way, table.get(operator)) for operator, way in ways.items()}
    checked = checked_decomposition_table(keep=())
    narrow = narrow_integer_rules(table)
    return table | images | narrow | _DRAWS | {op: checked[op] for op in CHECKED}


def _choice(way: Callable[..., Any], otherwise: Callable[..., Any] | None) -> Callable[..., Any]:
    def choose(*args: Any, **kwargs: Any) -> Any:
        found = way(*args, **kwargs) if is_image_on_cpu(args[0]) else NotImplemented
        if found is not NotImplemented or otherwise is None:
            return found
        return otherwise(*args, **kwargs)

    return choose


def _convolution_backward(gradient: Tensor, image: Tensor, weight: Tensor, *settings: Any) -> Any:
    if not weight.is_contiguous():
        return NotImplemented  # its gradient has its layout, which is not that of our kernels
    return CONVOLUTION_BACKWARD(gradient, image, weight, *settings)


def _batch_norm(
    image: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *settings: Any
) -> Any:
    if not training:
        return NotImplemented
    return norms.batch_norm_forward(image, weight, bias, mean, var, *settings)


def _batch_norm_without_running(
    image: Tensor, weight: Any, bias: Any, training: bool, *settings: Any
) -> Any:
    return norms.batch_norm_forward(image, weight, bias, None, None, *settings)[:3]


def _batch_norm_backward(
    gradient: Tensor, image: Tensor, weight: Any, _running_mean: Any, _running_var: Any,
    mean: Any, invstd: Any, training: bool, _eps: float, mask: Any,
) -> Any:  # fmt: skip
    if not training:
        return NotImplemented
    return norms.backward(gradient, image, weight, mean, invstd, mask)


_NORMS = {
    aten._native_batch_norm_legit_functional.default: _batch_norm,
    aten._native_batch_norm_legit.no_stats: _batch_norm_without_running,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
}

_DRAWS = {
    aten.native_dropout.default: decompose_dropout,
    # Inductor would compare uniform numbers, which are others than eager draws.
    aten.bernoulli.default: keep_stride_order(aten.bernoulli.default),
    # Up to torch 2.12 it would draw for all elements, and eager draws for those below zero alone.
    aten.rrelu_with_noise_functional.default: keep_stride_order(
        aten.rrelu_with_noise_functional.default
    ),
}


_EXTREMA = (
    aten.amin.default, aten.amax.default, aten.min.default, aten.max.default, aten.min.dim,
    aten.max.dim, aten.argmin.default, aten.argmax.default, aten.aminmax.default,
)  # fmt: skip


def _in_int32(operator: Any) -> Callable[..., Any]:
    def compute(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = operator(x.to(torch.int32), *args, **kwargs)
        if isinstance(result, Tensor):
            return _narrowed(result, x.dtype)
        return tuple(_narrowed(each, x.dtype) for each in result)

    return compute


def _narrowed(result: Tensor, dtype: torch.dtype) -> Tensor:
    return result.to(dtype) if result.dtype == torch.int32 else result  # positions are of 64 bits


def _abs(x: Tensor) -> Tensor:
    return torch.maximum(x, torch.neg(x))


_WAYS = {
    **{operator: ((torch.int8, torch.uint8), _in_int32(operator)) for operator in _EXTREMA},
    aten.abs.default: ((torch.int8, torch.int16), _abs),
}
"""For each operator the dtypes, and a function that computes it of these."""


def widen_narrow_integers(graph: fx.Graph) -> None:
    """Replaces the calls that Inductor gets wrong, in place.

    Args:
        graph: Functional, with fake tensors.
    """
    for node in list(graph.nodes):
        dtypes, function = _WAYS.get(node.target, ((), None))
        if function is not None and node.args[0].meta["val"].dtype in dtypes:
            replace_call(node, function)


def narrow_integer_rules(
    table: dict[Any, Callable[..., Any]],
) -> dict[Any, Callable[..., Any]]:
    """Returns the same as rules for tracing.

    Args:
        table: Rules for other dtypes, by the operator.
    """
    return {operator: _rule(operator, table.get(operator)) for operator in _WAYS}


def _rule(operator: Any, otherwise: Callable[..., Any] | None) -> Callable[..., Any]:
    dtypes, function = _WAYS[operator]

    def compute(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dtype in dtypes:
            return function(x, *args, **kwargs)
        return NotImplemented if otherwise is None else otherwise(x, *args, **kwargs)

    return compute

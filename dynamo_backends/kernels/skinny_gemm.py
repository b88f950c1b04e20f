"""Linear layers on a few rows, such as classifiers of small batches, at the speed of memory (CPU).

Their time is that of reading the weights. Libraries' products of matrices are made for many rows:
MKL reads the weights at a quarter of the speed of memory here where there are four rows. Whether
`skinny_gemm.cpp` is faster than MKL and oneDNN depends on shapes and processor, so it is measured.
Weights stay where they are; a bias and a relu are part of the call.
"""

import ctypes
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.functional import linear

from dynamo_backends.graph.custom_ops import register_op
from dynamo_backends.kernels.linears import prepacked_linear
from dynamo_backends.kernels.native_code import load_kernel, once, pointers
from dynamo_backends.kernels.patterns import frozen_nodes, linear_layer, replace, with_relu
from dynamo_backends.kernels.timing import fastest
from dynamo_backends.workers.race import Run

aten = torch.ops.aten

_LEAST = 1 << 20  # elements of a weight; smaller ones stay in the cache


@once
def _library() -> Any:
    """Returns the compiled `skinny_gemm.cpp`; None if it cannot be compiled here."""
    library = load_kernel(__file__)
    if library is not None:
        library.most.restype = ctypes.c_int64
    return library


def library_for(weight: Tensor) -> tuple[Any, tuple[Any, ...]] | None:
    """Returns what compiles the library for networks with such a weight, and its arguments."""
    is_large = weight.ndim == 2 and weight.numel() >= _LEAST
    return (_library, ()) if is_large and weight.dtype == torch.float32 else None


class _Sizes(ctypes.Structure):
    """See `Sizes` in skinny_gemm.cpp."""

    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("rows", "depth", "columns", "relu", "threads")
    )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    result = x.new_empty(len(x), len(weight))
    sizes = _Sizes(*x.shape, len(weight), relu, torch.get_num_threads())
    _library().multiply(*pointers(x, weight, bias, result), ctypes.byref(sizes))
    return result


def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    return x.new_empty(len(x), len(weight))


LINEAR = register_op(
    "linear_on_few_rows(Tensor x, Tensor weight, Tensor? bias, bool relu) -> Tensor",
    _linear,
    _linear_fake,
)


def use_skinny_gemm(module: fx.GraphModule) -> None:
    """Lets linear layers on a few rows be computed by the kernel here where that is faster.

    Args:
        module: Functional; frozen weights are read by `get_attr` nodes.
    """
    frozen = frozen_nodes(module.graph)
    for node in list(module.graph.nodes):
        parts = _parts(node, frozen)
        if parts is not None and _is_faster(*parts[:2]):
            _replace(node, *parts)
    module.recompile()


def _parts(
    node: fx.Node, frozen: Collection[fx.Node]
) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """Input, weight and bias of a linear layer for which the kernel is made."""
    layer = linear_layer(node, frozen)
    if layer is None:
        return None
    x, turned, bias = layer
    if turned.target is not aten.t.default:
        return None
    weight: Any = turned.args[0]
    given, w = x.meta["val"], weight.meta["val"]
    if not w.is_contiguous() or w.numel() < _LEAST:
        return None
    library = _library()
    if library is None or not 0 < len(given) <= library.most():
        return None
    return x, weight, bias


def _is_faster(x: fx.Node, weight: fx.Node) -> bool:
    shape, size = x.meta["val"].shape, weight.meta["val"].shape

    def ways() -> dict[str, Run]:
        w = torch.ones(size)
        found: dict[str, Run] = {
            "torch": lambda inputs: [linear(inputs[0], w)],
            "few rows": lambda inputs: [LINEAR(inputs[0], w, None, False)],
        }
        if torch.backends.mkldnn.is_available():
            by_onednn = prepacked_linear(w, shape[0])  # see `linears`, which comes after this
            found["oneDNN"] = lambda inputs: [by_onednn(inputs[0])]
        return found

    layout = (shape, (shape[1], 1), torch.float32)
    kind = f"linear layer {tuple(size)}"  # oneDNN's needs a copy of the weight
    return fastest(kind, "torch", ways, [layout], preferred="few rows") == "few rows"


def _replace(node: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None) -> None:
    chain, relu = with_relu(node)
    with node.graph.inserting_before(chain[-1]):
        call = node.graph.call_function(LINEAR, (x, weight, bias, relu))
    replace(chain, call)

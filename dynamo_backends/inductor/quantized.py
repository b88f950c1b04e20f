"""Linear layers in int8 by torchao, compiled by Inductor.

torchao quantizes modules, so each product with a constant weight becomes a `torch.nn.Linear` of the
graph first. "int8-dynamic" also quantizes activations, at each call and one scale a row;
"int8-weights" keeps products in float32. Convolutions stay in float32.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from dynamo_backends._torch_private import compile_quantized_with_inductor
from dynamo_backends.graph.graph import Graph
from dynamo_backends.inductor.runtime import with_constants
from dynamo_backends.int8.executable import Activations, QuantizedExecutable
from dynamo_backends.int8.options import DYNAMIC, saturates
from dynamo_backends.interface.errors import CompileError, reraise_as_compile_error
from dynamo_backends.interface.executable import Bound
from dynamo_backends.interface.logs import silence_loggers

aten = torch.ops.aten

_LINEAR, _MM, _ADDMM = aten.linear.default, aten.mm.default, aten.addmm.default
_TRANSPOSES = (aten.t.default, aten.permute.default, aten.transpose.int)


class InductorInt8Executable(QuantizedExecutable):
    """A block whose linear layers Inductor computes in int8.

    Args:
        graph: With static shapes.
        precision: "int8-dynamic" or "int8-weights".
    """

    def __init__(self, graph: Graph, precision: str):
        super().__init__(graph)
        self._precision = precision

    def prepare(self, weights: Sequence[Tensor], seen: Activations, in_float: float) -> Bound:
        """See `QuantizedExecutable.prepare`."""
        module = with_constants(self.graph, weights)
        if not use_linear_modules(module):
            raise CompileError("the graph has no linear layer with constant weights to quantize")
        with reraise_as_compile_error("torchao or Inductor failed"):
            quantize(module, self._precision)
            run = compile_quantized_with_inductor(module, list(seen[0]))
        results = self._results
        return lambda activations: results(run(*activations))


def quantize(module: nn.Module, precision: str) -> None:
    """Quantizes the linear layers of a module.

    Args:
        module: It is changed.
        precision: "int8-dynamic" or "int8-weights".
    """
    with warnings.catch_warnings(), silence_loggers("torchao", "torch.utils._pytree"):
        warnings.simplefilter("ignore")  # of torchao about itself
        from torchao.quantization import (
            Int8DynamicActivationInt8WeightConfig,
            Int8WeightOnlyConfig,
            quantize_,
        )

        settings: Any = Int8WeightOnlyConfig(set_inductor_config=False)
        if precision == DYNAMIC:
            settings = Int8DynamicActivationInt8WeightConfig(
                set_inductor_config=False, reduce_range=saturates()
            )
        quantize_(module, settings)


def use_linear_modules(module: fx.GraphModule) -> int:
    """Puts modules in the place of products with constant weights; returns how many.

    Args:
        module: Functional; weights are read by `get_attr` nodes. It is changed.
    """
    count = 0
    for node in list(module.graph.nodes):
        parts = _parts(node)
        if parts is None:
            continue
        x, weight, bias = parts
        name = f"linear_{count}"
        added = None if bias is None else _tensor(module, bias)
        module.add_submodule(name, _linear(_tensor(module, weight), added))
        with module.graph.inserting_before(node):
            made = module.graph.call_module(name, (x,))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        count += 1
    module.graph.eliminate_dead_code()
    module.recompile()
    return count


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def _parts(node: fx.Node) -> tuple[Any, fx.Node, fx.Node | None] | None:
    """Input, weight ``(out, in)`` and bias of a linear layer; None: it is none."""
    if node.op != "call_function" or node.target not in (_LINEAR, _MM, _ADDMM):
        return None
    if node.meta["val"].dtype != torch.float32:
        return None
    args: list[Any] = list(node.args)
    if node.target is _LINEAR:
        x, weight, bias = args[0], args[1], args[2] if len(args) > 2 else None
        found = _constant(weight)
    else:
        bias = args.pop(0) if node.target is _ADDMM else None
        if node.kwargs:  # scales of a product
            return None
        x, weight = args
        transposed = isinstance(weight, fx.Node) and weight.target in _TRANSPOSES
        found = _constant(weight.args[0]) if transposed else None
    if found is None or (bias is not None and _constant(bias) is None):
        return None
    if bias is not None and bias.meta["val"].ndim != 1:
        return None
    return x, found, bias


def _constant(node: Any) -> fx.Node | None:
    return node if isinstance(node, fx.Node) and node.op == "get_attr" else None


def _tensor(module: fx.GraphModule, node: fx.Node) -> Tensor:
    found: Tensor = getattr(module, str(node.target))
    return found

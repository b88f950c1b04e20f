"""The lowerings of torch's own exporter to ONNX.

| what | checked |
|---|---|
| `torch.onnx._internal.exporter`: `_core`, `_registration`, `_ir_passes` | 2.11+ |
| `torch.onnx._internal.fx.passes.type_promotion` | 2.11+ |
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree


def onnx_registry(opset: int) -> Any:
    """Returns the lowerings of `torch.onnx.export(dynamo=True)` for an opset version."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    return ONNXRegistry.from_torchlib(opset)


def add_onnx_input(node: fx.Node, model: Any, values: dict[str, Any], registry: Any) -> None:
    """Adds a placeholder as an input of an ONNX model; enters it in `values`."""
    from torch.onnx._internal.exporter import _core

    opset = _core._get_onnxscript_opset(registry.opset_version)
    _core._handle_placeholder_node(
        node, values, graph_like=model.graph, lower="at_conversion", opset=opset
    )


def add_onnx_call(
    node: fx.Node, model: Any, values: dict[str, Any], constants: dict[Any, Any], registry: Any
) -> None:
    """Adds an ATen call's lowering to an ONNX model; enters its results in `values`.

    Args:
        node: The call.
        model: The `onnx_ir.Model` to extend.
        values: ONNX values by node name; gets the results of the call.
        constants: Constants made so far, to be shared.
        registry: From `onnx_registry`.
    """
    from torch.onnx._internal.exporter import _core

    node.meta.setdefault("nn_module_stack", {})  # its absence is logged, one line per node
    _core._handle_call_function_node_with_lowering(
        model,
        node,
        values,
        graph_like=model.graph,
        constant_farm=constants,
        registry=registry,
        opset=_core._get_onnxscript_opset(registry.opset_version),
        node_name_to_local_functions={},
    )


def declare_onnx_opsets(model: Any) -> None:
    """Adds opset imports for every operator domain that an ONNX model uses."""
    from torch.onnx._internal.exporter._ir_passes import add_opset_imports

    add_opset_imports(model)


def promote_types(module: fx.GraphModule, fakes: Sequence[Any], mode: FakeTensorMode) -> None:
    """Inserts casts, in place, where torch would promote arguments to another dtype.

    Other calls are not run: the graph knows what they give.

    Args:
        module: An ATen graph, with `meta["val"]` of concrete sizes.
        fakes: One fake tensor of `mode` per placeholder.
        mode: Under which the graph is run.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.traceback import preserve_node_meta
    from torch.onnx._internal.fx.passes import type_promotion

    class Interpreter(type_promotion._TypePromotionInterpreter):
        """Runs the calls that it changes alone."""

        def run_node(self, n: fx.Node) -> Any:
            """See `fx.Interpreter.run_node`."""
            if n.op != "call_function":
                return super().run_node(n)
            given = n.args, n.kwargs
            with self._set_current_node(n):
                rule = type_promotion.get_type_promotion_rule(n, self.type_promotion_table)
                if rule is not None:
                    self._maybe_promote_node(n, rule)
            if n.args is given[0] and n.kwargs is given[1]:
                return pytree.tree_map_only(Tensor, _anew, n.meta["val"])
            return fx.Interpreter.run_node(self, n)

    interpreter = Interpreter(module, _promotion_table())
    with mode, enable_python_dispatcher(), preserve_node_meta():
        interpreter.run(*fakes)


def _anew(value: Tensor) -> Tensor:
    """Returns a tensor of the mode that is active."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


@functools.cache
def _promotion_table() -> Any:
    from torch.onnx._internal.fx.passes.type_promotion import TypePromotionTable

    return TypePromotionTable()

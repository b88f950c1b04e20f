"""ATen graphs to ONNX models, by the lowerings of torch's own exporter.

What happens to a graph, in order: torch's type promotion becomes casts; every call is lowered by
the registry that `torch.onnx.export(dynamo=True)` uses; inputs and outputs that torch stores in
another order than row-major are transposed inside the model; onnxscript folds constants and
rewrites; weights become initializers whose data is not in the model.
"""

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from onnxscript import version_converter
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends._torch_private.forks import fork_safe_rlock
from dynamo_backends.graph.call_decomposition import ORIGIN, get_origin_name
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import infer_layout
from dynamo_backends.graph.legalize import insert_promotion_casts
from dynamo_backends.graph.masked_attention import zero_fully_masked_queries
from dynamo_backends.graph.symbolic_scalars import require_no_hardcoded_sizes
from dynamo_backends.interface.errors import LoweringError, first_line, reraise_as_compile_error
from dynamo_backends.interface.logs import silence_loggers
from dynamo_backends.onnx.dtypes import DTYPES, label_new_nodes, name_nodes
from dynamo_backends.onnx.exporter_lowerings import OPSET, exporter_registry
from dynamo_backends.onnx.float16 import compute_in_float32
from dynamo_backends.onnx.formulas import apply_formulas
from dynamo_backends.onnx.optimizing import optimize, transpose_to_storage_order
from dynamo_backends.onnx.symbolic_dimensions import SymbolicDimensions, index_put_to_scatter

_IR_VERSION = 10
WEIGHTS_FILE = "weights"  # a name that models need; no file is read

# Loggers that speak to authors of exporters; what they say is checked here afterwards.
_EXPORTERS = ("torch.onnx", "onnxscript", "onnx_ir")

_lock = fork_safe_rlock()  # the exporter records through a process-wide evaluator


@dataclass(frozen=True)
class LoweredOnnx:
    """An ONNX model of a graph without its weights' data, and its input and output names.

    Attributes:
        model: Without the weights' data.
        inputs: Names in the model, one per graph input; None for inputs that it does not have.
        outputs: Names in the model, one per graph output.
    """

    model: ir.Model
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]


def lower_to_onnx(graph: Graph, ranged: bool = False) -> LoweredOnnx:
    """Lowers a graph to an ONNX model in storage order, without its weights' data.

    Args:
        graph: In normal form. It is not changed.
        ranged: Sizes that come from symbolic shapes (see `graph.sizes`) stay symbolic in the model.

    Returns:
        A model whose inputs and outputs have their dimensions in the order in which torch stores
        them (see `graph.layouts.infer_layout`), so that no copy is needed around the model.

    Raises:
        LoweringError: A call cannot be lowered; it names the node.
        CompileError: The model cannot be optimised, or a size does not follow from the inputs.
    """
    with _lock, silence_loggers(*_EXPORTERS):
        module = _promoted(graph)
        dimensions = SymbolicDimensions(graph) if ranged else None
        if dimensions is not None:
            require_no_hardcoded_sizes(module.graph, graph.module.graph)
            dimensions.lift_to_placeholders(module)
        else:
            index_put_to_scatter(module)
        model = _translate(graph, module, dimensions)
        transpose_to_storage_order(model, graph)
        with reraise_as_compile_error("onnxscript cannot optimise the model", _reason):
            version_converter.convert_version(model, OPSET)
            optimize(model)
            name_nodes(model)
            ClearMetadataAndDocStringPass()(model)
        _check_outputs(model, graph, dimensions)
        inputs = _settle_inputs(model, graph)
        return LoweredOnnx(model, inputs, tuple(str(v.name) for v in model.graph.outputs))


def _promoted(graph: Graph) -> fx.GraphModule:
    """Returns a copy of the graph's module with formulas and explicit type promotion."""
    module = graph.copy().module
    compute_in_float32(module)
    apply_formulas(module, graph.kind)
    insert_promotion_casts(module)
    zero_fully_masked_queries(module)
    return module


def _translate(
    graph: Graph, module: fx.GraphModule, dimensions: SymbolicDimensions | None
) -> ir.Model:
    table = exporter_registry()
    body = ir.Graph([], [], nodes=[], name="main")
    model = ir.Model(body, ir_version=_IR_VERSION, producer_name="dynamo-backends")
    values: dict[str, Any] = {}
    constants: dict[Any, Any] = {}
    own = {node.name for node in graph.calls}
    for node in module.graph.find_nodes(op="placeholder"):
        if isinstance(node.meta["val"], Tensor):
            private.add_onnx_input(node, model, values, table)
            _set_shape(node, values[node.name], dimensions)
    if dimensions is not None:
        dimensions.emit_sizes(model, values)
        label_new_nodes(model, "sizes")
    for node in module.graph.nodes:
        if node.op == "call_function":
            try:
                _give_defaults(node)
                private.add_onnx_call(node, model, values, constants, table)
                label_new_nodes(model, _blamed(node, own))
                _set_shape(node, values[node.name], dimensions)
            except Exception as error:
                blamed = _blamed(node, own)
                reason = f"its lowering to ONNX failed: {_reason(error)}"
                raise LoweringError(blamed, str(node.target), reason) from error
    results: Any = module.graph.output_node().args[0]
    model.graph.outputs.extend(values[node.name] for node in results)
    private.declare_onnx_opsets(model)
    return model


def _set_shape(node: fx.Node, values: Any, dimensions: SymbolicDimensions | None) -> None:
    """Corrects the shapes of a call's values, which the exporter knows for one call only."""
    if dimensions is None:
        return
    for value in values if isinstance(values, list | tuple) else (values,):
        if value.shape is not None:
            value.shape = dimensions.shape(node.name, len(value.shape))


def _give_defaults(node: fx.Node) -> None:
    """Writes out defaults of the schema that the exporter's lowering has none for."""
    metas = exporter_registry().get_decomps(node.target)
    schema = getattr(node.target, "_schema", None)
    if not metas or metas[0].signature is None or schema is None:
        return
    parameters = metas[0].signature.params
    for i in range(len(node.args), min(len(schema.arguments), len(parameters))):
        argument = schema.arguments[i]
        if argument.kwarg_only or argument.name in node.kwargs or not parameters[i].required:
            break
        node.args = (*node.args, argument.default_value)


def _blamed(node: fx.Node, own: set[str]) -> str:
    """Returns the captured graph's call that a node of the rewritten graph comes from."""
    while node.name not in own and ORIGIN not in node.meta and node.users:
        node = next(iter(node.users))
    return get_origin_name(node)


def _reason(error: BaseException) -> str:
    """Returns the innermost message of an exporter's error as one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)


def _check_outputs(model: ir.Model, graph: Graph, dimensions: SymbolicDimensions | None) -> None:
    """Refuses a lowering that promises another dtype or shape than torch does."""
    for value, node in zip(model.graph.outputs, graph.outputs, strict=True):
        fake = node.meta["val"]
        storage = infer_layout(fake)
        expected = list(storage.dense_shape(fake.shape))
        known = [] if value.shape is None else list(value.shape)
        wrong = value.shape is not None and (
            len(known) != len(expected)
            or any(isinstance(k, int) and k != e for k, e in zip(known, expected, strict=True))
        )
        dtype = DTYPES[fake.dtype]
        if wrong or (value.dtype is not None and value.dtype != dtype):
            raise LoweringError(
                node.name,
                str(node.target),
                f"its lowering returns {value.dtype}{known} instead of {dtype}{expected}",
            )
        value.dtype = dtype
        value.shape = ir.Shape(expected)
        if dimensions is not None:
            sizes = dimensions.shape(node.name, fake.ndim)
            value.shape = ir.Shape(
                [1 if d in storage.expanded else sizes[d] for d in storage.order]
            )


def _settle_inputs(model: ir.Model, graph: Graph) -> tuple[str | None, ...]:
    """Turns weights into initializers without data and drops unused inputs; returns the names."""
    names: list[str | None] = []
    weights = frozenset(graph.weights)
    values = iter(list(model.graph.inputs))
    offset = 0
    for i, node in enumerate(graph.placeholders):
        value = next(values) if isinstance(node.meta["val"], Tensor) else None
        if value is None or not (value.uses() or value.is_graph_output()):
            names.append(None)
            if value is not None:
                model.graph.inputs.remove(value)
            continue
        names.append(str(value.name))
        if i in weights:
            model.graph.inputs.remove(value)
            offset = _without_data(value, node.meta["val"], offset)
            model.graph.register_initializer(value)
    return tuple(names)


def _without_data(value: ir.Value, fake: Tensor, offset: int) -> int:
    assert value.dtype is not None
    size = fake.numel() * fake.element_size()
    shape = ir.Shape(fake.shape)
    name = str(value.name)
    value.const_value = ir.ExternalTensor(
        WEIGHTS_FILE, offset, size, value.dtype, shape=shape, name=name
    )
    return offset + size

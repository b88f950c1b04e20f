"""ATen graphs to OpenVINO models, by OpenVINO's own PyTorch frontend.

What happens to a graph, in order: torch's type promotion becomes casts; calls that the frontend
converts wrongly are rewritten (`rewrites.py`); inputs and outputs that torch stores in another
order than row-major are permuted inside the graph; the frontend converts all of it; operations
whose kernels are wrong are replaced (`kernels.py`); results get the element types that torch
promises.
"""

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends.graph.call_decomposition import get_origin_name
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import infer_input_layout, infer_layout, row_major_layout
from dynamo_backends.graph.legalize import copy_with_promotion_casts, insert_layout_permutes
from dynamo_backends.graph.masked_attention import zero_fully_masked_queries
from dynamo_backends.graph.symbolic_scalars import require_no_hardcoded_sizes
from dynamo_backends.graph.symbolic_sizes import (
    SizeWithExpression,
    distinct_varying_sizes,
    drop_size_expressions,
    lift_sizes_to_inputs,
    sizes_of,
)
from dynamo_backends.interface.errors import CompileError, LoweringError
from dynamo_backends.openvino.aten_rewrites import rewrite_unsupported_calls
from dynamo_backends.openvino.dtypes import DTYPES, replace_float64
from dynamo_backends.openvino.frontend import ConversionError, convert_to_model
from dynamo_backends.openvino.kernel_workarounds import replace_faulty_operations
from dynamo_backends.openvino.vendor import Model, PartialShape, Type, ops
from dynamo_backends.openvino.wide_integers import has_int64, needs_int64_pairs, split_int64_calls

aten = torch.ops.aten


@dataclass(frozen=True)
class LoweredOpenVino:
    """An OpenVINO model of a graph, and the mapping from graph to model inputs.

    Attributes:
        model: Weights are inputs of it.
        inputs: For each graph input its place among the model's inputs; None for one that the model
            does not have.
    """

    model: Model
    inputs: tuple[int | None, ...]


def lower_to_model(graph: Graph, ranged: bool = False, wide: bool = True) -> LoweredOpenVino:
    """Lowers an ATen graph to an OpenVINO model.

    Args:
        graph: In normal form. It is not changed.
        ranged: The model is for all sizes that the symbols allow. After the graph's inputs it has
            those of the sizes of the graph (see `graph.sizes.distinct_varying_sizes`).
        wide: 64-bit integers that are not known to fit into 32 bits are computed as pairs.

    Returns:
        A model whose inputs and outputs have their dimensions in the order in which torch stores
        them (see `graph.layouts.infer_layout`), so that no copy is needed around the model.

    Raises:
        LoweringError: A call cannot be lowered; it names the node.
        CompileError: The graph cannot be lowered for a range.
    """
    module = copy_with_promotion_casts(graph)
    if not ranged:
        drop_size_expressions(module.graph)
    calls = {node for node in module.graph.nodes if wide and needs_int64_pairs(node)}
    rewrite_unsupported_calls(node for node in module.graph.nodes if node not in calls)
    zero_fully_masked_queries(module)
    calls |= _store(module.graph, graph, calls)
    wide_inputs, wide_outputs, made = split_int64_calls(module, calls)
    rewrite_unsupported_calls(made)
    if ranged:
        require_no_hardcoded_sizes(module.graph, graph.module.graph)
        lift_sizes_to_inputs(module.graph, distinct_varying_sizes(graph))
    replace_float64(module.graph)
    for node in module.graph.nodes:
        _spell_out(node)
    places = _merge_outputs(module.graph)
    shapes = _input_shapes(graph, ranged, wide_inputs)
    try:
        model = _with_results(convert_to_model(module, shapes), places)
    except ConversionError as error:
        _blame(graph, module, error)
    _check_inputs(model, module.graph.find_nodes(op="placeholder"), shapes, wide_inputs)
    replace_faulty_operations(model)
    _settle_outputs(model, graph, ranged, wide_outputs)
    return LoweredOpenVino(model, _drop_unused(model))


def _store(module: fx.Graph, graph: Graph, wide: Collection[fx.Node]) -> set[fx.Node]:
    """Permutes as `insert_layout_permutes`; returns those of its calls that hold wide integers."""
    before = set(module.nodes)
    insert_layout_permutes(module, graph)
    made = [node for node in module.nodes if node not in before]
    found: set[fx.Node] = set()
    for node in made:
        if has_int64(node) and any(
            n in wide or n in found for n in (*node.all_input_nodes, *node.users)
        ):
            found.add(node)
    return found


def _merge_outputs(graph: fx.Graph) -> list[int]:
    """Removes duplicate outputs, which the frontend does not accept.

    Returns:
        For each output of the graph its place among those that are left.
    """
    places: dict[fx.Node, int] = {}
    left: list[fx.Node] = []
    found: list[int] = []
    outputs: Any = graph.output_node().args[0]
    for node in outputs:
        source: Any = node
        while source.target is aten.clone.default:
            source = source.args[0]
        if source not in places:
            places[source] = len(left)
            left.append(node)
        found.append(places[source])
    graph.output_node().args = (tuple(left),)
    return found


def _with_results(model: Model, places: Sequence[int]) -> Model:
    """Returns a model with the results at these places, repeats included."""
    if len(places) == len(model.get_results()):
        return model
    sources = [result.input_value(0) for result in model.get_results()]
    return Model([ops.result(sources[i]) for i in places], model.get_parameters())


def _spell_out(node: fx.Node) -> None:
    """Writes out default arguments, which the frontend's rules count.

    They count arguments, so defaults are written out; and they take an absent correction for 0,
    which torch takes for 1.
    """
    if node.target in _CORRECTED and node.kwargs.get("correction") is None:
        node.kwargs = {**node.kwargs, "correction": 1}
    schema = getattr(node.target, "_schema", None)
    for argument in schema.arguments[len(node.args) :] if schema is not None else ():
        if argument.kwarg_only or argument.name in node.kwargs or not argument.has_default_value():
            break
        node.args = (*node.args, argument.default_value)


_CORRECTED = (aten.var.correction, aten.std.correction, aten.var_mean.correction)


def _blame(graph: Graph, module: fx.GraphModule, error: ConversionError) -> None:
    """Raises what the pipeline understands in the place of a frontend's error."""
    reason = f"OpenVINO's frontend cannot convert it: {error.reason}"
    at_fault = {get_origin_name(n) for n in module.graph.nodes if n.name == error.node_name}
    for node in graph.calls:
        if node.name in at_fault or len(graph.calls) == 1:
            raise LoweringError(node.name, str(node.target), reason) from error
    raise CompileError(f"OpenVINO's frontend cannot convert the graph: {error.reason}") from error


def _shape(node: fx.Node, ranged: bool) -> list[int]:
    """Returns the sizes of a node's tensor; -1 for dynamic ones."""
    known = zip(node.meta["val"].shape, sizes_of(node), strict=True)
    return [
        -1 if ranged and isinstance(size, SizeWithExpression | None) else n for n, size in known
    ]


def _input_shapes(graph: Graph, ranged: bool, wide: Collection[str]) -> dict[str, list[int]]:
    """Returns the inputs' shapes in storage order, by name; -1 for dynamic sizes."""
    shapes = {}
    for place, x in zip(graph.placeholders, graph.inputs, strict=True):
        value = place.meta["val"]
        if isinstance(value, Tensor):
            storage = row_major_layout(value.ndim) if x.frozen else infer_input_layout(value)
            shape = _shape(place, ranged and not x.frozen)
            shapes[place.name] = [shape[d] for d in storage.order] + [2] * (place.name in wide)
    return shapes


def _check_inputs(
    model: Model,
    places: Sequence[fx.Node],
    shapes: Mapping[str, Sequence[int]],
    wide: Collection[str],
) -> None:
    """Sets the element types and shapes of the model's inputs to those of torch."""
    parameters = model.get_parameters()
    if len(parameters) != len(places):
        raise CompileError(
            f"OpenVINO's frontend returned {len(parameters)} inputs for {len(places)} placeholders"
        )
    for parameter, node in zip(parameters, places, strict=True):
        value = node.meta["val"]
        dtype = value.dtype if isinstance(value, Tensor) else torch.int64
        parameter.set_element_type(Type.i32 if node.name in wide else DTYPES[dtype])
        parameter.set_partial_shape(PartialShape(list(shapes.get(node.name, ()))))
    model.validate_nodes_and_infer_types()


_INTEGERS = (Type.u8, Type.i8, Type.i16, Type.i32, Type.i64)


def _settle_outputs(model: Model, graph: Graph, ranged: bool, wide: Sequence[bool]) -> None:
    """Casts integer outputs to torch's width; raises on any other mismatch.

    The frontend computes indices in 32 or 64 bits; their width is put right.
    """
    results = model.get_results()
    if len(results) != len(graph.outputs):
        raise CompileError(
            f"OpenVINO's frontend returned a wrong number of outputs: {len(results)}"
        )
    for result, node, is_pair in zip(results, graph.outputs, wide, strict=True):
        fake, sizes = node.meta["val"], _shape(node, ranged)
        storage = infer_layout(fake)
        expected = list(storage.dense_shape(sizes)) + [2] * is_pair
        source = result.input_value(0)
        shape, kind = source.get_partial_shape(), source.get_element_type()
        dtype = Type.i32 if is_pair else DTYPES[fake.dtype]
        known = list(shape.to_shape()) if shape.is_static else None
        if kind != dtype and kind in _INTEGERS and dtype in _INTEGERS:
            result.input(0).replace_source_output(ops.convert(source, dtype).output(0))
            kind = dtype
        wrong = not _agrees(shape, expected) if ranged else known != expected
        if kind != dtype or wrong:
            call = node.args[0] if node.target is operator.getitem else node
            raise LoweringError(
                call.name,
                str(call.target),
                f"its conversion returns {kind.get_type_name()}{known if known else str(shape)} "
                f"instead of {dtype.get_type_name()}{expected}",
            )
    model.validate_nodes_and_infer_types()


def _agrees(shape: PartialShape, expected: Sequence[int]) -> bool:
    """Returns whether a shape equals the expected one, and is dynamic where that is."""
    if not shape.compatible(PartialShape(expected)):
        return False
    return shape.rank.is_dynamic or all(
        dim.is_dynamic for dim, n in zip(shape, expected, strict=True) if n == -1
    )


def _drop_unused(model: Model) -> tuple[int | None, ...]:
    """Removes unused inputs; returns the new index of each input, None if removed."""
    places: list[int | None] = []
    count = 0
    for parameter in list(model.get_parameters()):
        if parameter.output(0).get_target_inputs():
            places.append(count)
            count += 1
        else:
            places.append(None)
            model.remove_parameter(parameter)
    return tuple(places)

"""Transposes where torch stores an input or promises an output in another order than row-major."""

from collections.abc import Sequence

import onnx_ir as ir
from torch import Tensor

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import Storage, input_storage, storage_of


def store(model: ir.Model, graph: Graph) -> None:
    """Puts a graph's inputs, but not its weights, and its outputs in their order in memory.

    Args:
        model: Of the graph, with one input per tensor that the graph reads. It is changed.
        graph: In normal form.
    """
    tensors = [p for p in graph.placeholders if isinstance(p.meta["val"], Tensor)]
    weights = {graph.placeholders[i] for i in graph.weights}
    for i, node in enumerate(tensors):
        storage = input_storage(node.meta["val"])
        if not storage.is_row_major and node not in weights:
            _store_input(model, i, storage)
    for i, node in enumerate(graph.outputs):
        storage = storage_of(node.meta["val"])
        if not storage.is_row_major:
            _store_output(model, i, storage)


def _store_input(model: ir.Model, i: int, storage: Storage) -> None:
    logical = model.graph.inputs[i]
    assert logical.shape is not None
    stored = ir.Value(
        name=f"{logical.name}_stored",
        shape=ir.Shape([logical.shape[d] for d in storage.order]),
        type=logical.type,
    )
    transpose = ir.node("Transpose", [stored], {"perm": storage.inverse})
    result = transpose.outputs[0]
    result.shape, result.type = logical.shape, logical.type
    for user, place in list(logical.uses()):
        user.replace_input_with(place, result)
    model.graph.inputs[i] = stored
    model.graph.insert_before(model.graph[0], transpose)


def _store_output(model: ir.Model, i: int, storage: Storage) -> None:
    value = model.graph.outputs[i]
    if storage.expanded:
        value = _first_along(model, value, storage.expanded)
    transpose = ir.node("Transpose", [value], {"perm": list(storage.order)})
    result = transpose.outputs[0]
    result.type = value.type
    if value.shape is not None:
        result.shape = ir.Shape([value.shape[d] for d in storage.order])
    model.graph.append(transpose)
    model.graph.outputs[i] = result


def _first_along(model: ir.Model, value: ir.Value, dims: Sequence[int]) -> ir.Value:
    bounds = ([0] * len(dims), [1] * len(dims), list(dims))
    constants = [ir.node("Constant", [], {"value_ints": list(b)}) for b in bounds]
    cut = ir.node("Slice", [value, *(c.outputs[0] for c in constants)])
    model.graph.extend([*constants, cut])
    result = cut.outputs[0]
    result.type = value.type
    if value.shape is not None:
        shape = [1 if d in dims else n for d, n in enumerate(value.shape)]
        result.shape = ir.Shape(shape)
    return result

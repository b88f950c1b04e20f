"""onnxscript's optimisation of a model, and transposes where memory orders differ from row-major.

`onnxscript.optimizer.optimize_ir` tries each of its forty rules on each node, and one of them lists
the whole model each time. Here a rule is tried on nodes of the operator that it ends with. Passes
and results are the same, but for rules that leave out `x + c` and `x * c`: they take each c below
1e-8 for 0, and each c within 1e-5 of 1 for 1. ONNX Runtime leaves out what is exactly that.
"""

import copy
import functools
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import rewriter
from onnxscript.optimizer import constant_folding
from torch import Tensor

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import MemoryLayout, infer_input_layout, infer_layout

_STEPS = 2  # as in `optimize_ir`


def optimize(model: ir.Model) -> None:
    """Optimizes a model in place, as `onnxscript.optimizer.optimize_ir` does, but faster."""
    passes = ir.passes.Sequential(
        common.InlinePass(),
        ir.passes.PassManager(
            [
                constant_folding.FoldConstantsPass(
                    shape_inference=True,
                    input_size_limit=constant_folding.DEFAULT_CONSTANT_FOLD_INPUT_SIZE_LIMIT,
                    output_size_limit=constant_folding.DEFAULT_CONSTANT_FOLD_OUTPUT_SIZE_LIMIT,
                ),
                rewriter.RewritePass(_rules()),
                common.RemoveUnusedNodesPass(),
                common.RemoveUnusedFunctionsPass(),
                common.RemoveUnusedOpsetsPass(),
            ],
            steps=_STEPS,
            early_stop=True,
        ),
        common.RemoveUnusedNodesPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    )
    passes(model)


@functools.cache
def _rules() -> tuple[Any, ...]:
    rules = (rule for rule in rewriter._DEFAULT_REWRITE_RULES if not _is_arithmetic(rule))
    return tuple(map(_for_its_operator, rules))


def _is_arithmetic(rule: Any) -> bool:
    """Returns whether a rule matches one sum, difference, product or quotient."""
    nodes = list(rule._target_pattern)
    return len(nodes) == 1 and str(nodes[0].op) in ("Add", "Sub", "Mul", "Div")


def _for_its_operator(rule: Any) -> Any:
    """Limits a rewrite rule to nodes of the operator with which its pattern ends."""
    ends = rule._target_pattern.output_nodes
    identifier = ends[0].op_identifier() if ends else None
    if identifier is None:  # of any operator
        return rule
    sparing = copy.copy(rule)
    sparing.try_rewrite = functools.partial(_try_rewrite, rule, identifier[1])
    return sparing


def _try_rewrite(
    rule: Any, operator: str, model: ir.Model, graph: Any, node: ir.Node, **how: Any
) -> Any:
    return rule.try_rewrite(model, graph, node, **how) if node.op_type == operator else None


def transpose_to_storage_order(model: ir.Model, graph: Graph) -> None:
    """Inserts transposes so that inputs and outputs are in their memory order.

    Args:
        model: Of the graph, with one input per tensor that the graph reads. It is changed.
        graph: In normal form.
    """
    tensors = [p for p in graph.placeholders if isinstance(p.meta["val"], Tensor)]
    weights = {graph.placeholders[i] for i in graph.weights}
    for i, node in enumerate(tensors):
        storage = infer_input_layout(node.meta["val"])
        if not storage.is_row_major and node not in weights:
            _store_input(model, i, storage)
    for i, node in enumerate(graph.outputs):
        storage = infer_layout(node.meta["val"])
        if not storage.is_row_major:
            _store_output(model, i, storage)


def _store_input(model: ir.Model, i: int, storage: MemoryLayout) -> None:
    logical = model.graph.inputs[i]
    assert logical.shape is not None
    stored = ir.Value(
        name=f"{logical.name}_stored",
        shape=ir.Shape([logical.shape[d] for d in storage.order]),
        type=logical.type,
    )
    transpose = ir.node("Transpose", [stored], {"perm": storage.inverse_order})
    result = transpose.outputs[0]
    result.shape, result.type = logical.shape, logical.type
    for user, place in list(logical.uses()):
        user.replace_input_with(place, result)
    model.graph.inputs[i] = stored
    model.graph.insert_before(model.graph[0], transpose)


def _store_output(model: ir.Model, i: int, storage: MemoryLayout) -> None:
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

"""onnxscript's optimisation of a model, without looks at nodes that a rewriting cannot be about.

`onnxscript.optimizer.optimize_ir` tries each of its forty rules on each node, and one of them lists
the whole model each time. Here a rule is tried on nodes of the operator that it ends with. Passes
and results are the same, but for rules that leave out `x + c` and `x * c`: they take each c below
1e-8 for 0, and each c within 1e-5 of 1 for 1. ONNX Runtime leaves out what is exactly that.
"""

import copy
import functools
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import rewriter
from onnxscript.optimizer import constant_folding

_STEPS = 2  # as in `optimize_ir`


def optimize(model: ir.Model) -> None:
    """Does to a model, in place, what `onnxscript.optimizer.optimize_ir` does."""
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
    """Whether a rule is about a single sum, difference, product or quotient."""
    nodes = list(rule._target_pattern)
    return len(nodes) == 1 and str(nodes[0].op) in ("Add", "Sub", "Mul", "Div")


def _for_its_operator(rule: Any) -> Any:
    """A rule that looks only at nodes of the operator with which its pattern ends."""
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

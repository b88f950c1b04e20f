"""ATen graphs to Relax, by the conversions of TVM's importer.

What happens to a graph, in order: torch's type promotion becomes casts; inputs and outputs that
torch stores in another order than row-major are permuted inside the graph; calls are converted one
by one; a result whose type is not the one that torch promises is refused.
"""

import operator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.legalize import copy_with_promotion_casts, insert_layout_permutes
from dynamo_backends.interface.errors import CompileError, LoweringError, error_lines
from dynamo_backends.tvm.converters import Importer
from dynamo_backends.tvm.dtypes import DTYPES, INTEGERS
from dynamo_backends.tvm.vendor import relax, tvm

MAIN = "main"


@dataclass(frozen=True)
class LoweredRelax:
    """A Relax module of a graph.

    Attributes:
        module: Its function `main` takes activations, then weights, and returns a tuple.
        activations: Positions among the graph's inputs of those that it takes.
        weights: Likewise.
    """

    module: Any
    activations: tuple[int, ...]
    weights: tuple[int, ...]


def lower(graph: Graph) -> LoweredRelax:
    """Lowers a graph with static shapes.

    Args:
        graph: In normal form. It is not changed.

    Returns:
        A module whose activations and results have their dimensions in the order in which torch
        stores them (see `graph.layouts.storage_of`), so that no copy is needed around it.
        Weights are row-major.

    Raises:
        LoweringError: A call cannot be lowered; it names the node.
    """
    module = copy_with_promotion_casts(graph)
    insert_layout_permutes(module.graph, graph)
    places = [n for n in module.graph.nodes if n.op == "placeholder"]
    used = [bool(n.users) and isinstance(n.meta["val"], Tensor) for n in places]
    activations = tuple(i for i in graph.activations if used[i])
    weights = tuple(i for i in graph.weights if used[i])
    return build_module(graph, module.graph, activations, weights)


def build_module(
    graph: Graph,
    lowered: fx.Graph,
    activations: tuple[int, ...],
    weights: tuple[int, ...],
    importer: Importer | None = None,
) -> LoweredRelax:
    """Converts the calls of a lowered graph.

    Args:
        graph: Where it comes from.
        lowered: From `graph.legalize`.
        activations: Positions of those inputs that are parameters of the module.
        weights: Likewise.
        importer: Knows what differs from call to call.

    Raises:
        LoweringError: A call cannot be lowered; it names the node.
    """
    importer = importer or Importer()
    places = lowered.find_nodes(op="placeholder")
    importer.block_builder = builder = relax.BlockBuilder()
    parameters = []
    for i in (*activations, *weights):
        parameters.append(_parameter(importer, places[i]))
        importer.env[places[i]] = parameters[-1]
    attributes = {"num_input": len(activations)}
    with builder.function(MAIN, parameters, attrs=attributes):
        with builder.dataflow():
            failure = _convert_calls(importer, lowered)
            results: Any = () if failure else lowered.output_node().args[0]
            # A builder whose function is not finished complains on stderr.
            values = [importer.env[n] for n in results] or [relax.const(0)]
            output = builder.emit_output(tuple(values))
        builder.emit_func_output(output)
    if failure is not None:
        _blame(failure[0], graph, failure[1])
    return LoweredRelax(builder.get(), activations, weights)


def _parameter(importer: Importer, node: fx.Node) -> Any:
    value = node.meta["val"]
    shape = importer.shapes.get(node) or list(value.shape)
    return relax.Var(node.name, relax.TensorType(shape, DTYPES[value.dtype]))


def _convert_calls(importer: Importer, module: fx.Graph) -> tuple[fx.Node, Exception] | None:
    """Converts one call after the other; returns the one that cannot be, and why."""
    for node in module.nodes:
        if node.op == "call_function":
            try:
                importer.env[node] = _convert(importer, node)
            except Exception as error:
                return node, error
    return None


def _convert(importer: Importer, node: fx.Node) -> Any:
    if node.target is operator.getitem:
        return _checked(importer, _item(importer, node), node)
    convert = importer.convert_map.get(node.target.__name__)  # type: ignore[union-attr]
    if convert is None:
        raise ValueError("TVM's importer has no conversion of it")
    importer.check_fixed(node)
    result = convert(node)
    return _checked(importer, result, node) if isinstance(node.meta["val"], Tensor) else result


def _item(importer: Importer, node: fx.Node) -> Any:
    """Returns one of several results; some conversions give the first alone."""
    source, index = node.args
    found: Any = importer.env[source]
    if isinstance(found, tuple | list):
        return found[index]  # type: ignore[index]
    if isinstance(found.ty, relax.TupleType):
        return importer.emit(relax.TupleGetItem(found, index))
    if index != 0:
        raise ValueError("its conversion returns only the first result")
    return found


def _checked(importer: Importer, result: Any, node: fx.Node) -> Any:
    """Returns a result of the type that torch promises; only the width of integers is put right.

    Raises:
        ValueError: It has another type.
    """
    value: Tensor = node.meta["val"]
    kind = getattr(result, "ty", None)
    if not isinstance(kind, relax.TensorType) or kind.shape is None:
        raise ValueError("its conversion returns no tensor of known shape")
    shape, dtype = list(kind.shape.values), str(kind.dtype)
    expected = DTYPES[value.dtype]
    if dtype != expected and dtype in INTEGERS and expected in INTEGERS:
        result, dtype = importer.emit(relax.op.astype(result, expected)), expected
    varies = importer.varying(node)
    known = [int(n) if isinstance(n, tvm.tirx.IntImm) else None for n in shape]
    if any(n is None and d not in varies for d, n in enumerate(known)):
        raise ValueError("its conversion returns a tensor of unknown shape")
    promised = [None if d in varies else n for d, n in enumerate(value.shape)]
    if dtype != expected or known != promised:
        raise ValueError(
            f"its conversion returns {dtype}{known} instead of {expected}{list(value.shape)}"
        )
    return result


def _blame(node: fx.Node, graph: Graph, error: Exception) -> None:
    """Raises what the pipeline understands: the call of the captured graph that is at fault."""
    own = {n.name: n for n in graph.calls if n.target is not operator.getitem}
    reason = plain_message(error)
    if node.target is operator.getitem:
        node = node.all_input_nodes[0]
    while node.name not in own and node.users:  # a cast or a permutation before a call
        node = next(iter(node.users))
    if node.name not in own:
        raise CompileError(f"an output cannot be lowered to TVM: {reason}") from error
    raise LoweringError(node.name, str(own[node.name].target), reason) from error


def plain_message(error: BaseException) -> str:
    """Returns what one of TVM's messages says, in one line."""
    lines = error_lines(error)
    told = [line for line in lines if not line.startswith(("File ", "Traceback", "^", "[bt]"))]
    return (told or lines)[-1][:200]

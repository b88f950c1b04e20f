"""Compiles a graph that was specialised at bounds for all sizes up to them."""

import dataclasses
from collections.abc import Mapping

import sympy
import torch

from dynamo_backends._torch_private import FakeTensorMode
from dynamo_backends.graph.graph import Graph, Input, Role
from dynamo_backends.graph.symbolic_sizes import (
    SIZES,
    STRIDES,
    SizeWithExpression,
    all_varying_sizes,
    collect_varying_sizes,
)
from dynamo_backends.interface.errors import CompileError, LoweringError, NotPaddedError
from dynamo_backends.xla.compiler import compile_graph
from dynamo_backends.xla.lowering.context import LoweringOptions
from dynamo_backends.xla.lowering.padded.interpreter import PaddedLowering
from dynamo_backends.xla.padded.executable import PaddedExecutable, ValidRegion
from dynamo_backends.xla.runtime import PjrtDevice

NUMBERS = "real_sizes"
"""Name of the input that has the real sizes."""


def compile_padded(graph: Graph, device: PjrtDevice, options: LoweringOptions) -> PaddedExecutable:
    """Compiles a graph of supported calls, which may be changed, for one device.

    Args:
        graph: Specialised at bounds; sizes know their expressions.
        device: Where it will run.
        options: For the lowering.

    Raises:
        NotPaddedError: An operator, which it names, cannot take padded arrays, or it cannot be
            compiled; whether it can be at all is seen when it is compiled exactly.
    """
    numbers = collect_dynamic_sizes(graph)
    places = {size.expression: i for i, size in enumerate(numbers)}
    complete = add_sizes_input(graph, len(numbers))
    lowering = PaddedLowering(complete.module.graph, options, places)
    try:
        inner = compile_graph(complete, device, options, lowering)
        outlines = [ValidRegion.of(extents, places) for extents in lowering.outputs]
        return PaddedExecutable(inner, graph, numbers, outlines)
    except LoweringError as error:
        raise NotPaddedError(error.op, error.reason) from error
    except CompileError as error:
        raise NotPaddedError("the graph", str(error)) from error


def load_padded(parts: Mapping[str, bytes], graph: Graph, device: PjrtDevice) -> PaddedExecutable:
    """Recreates an executable from its `dump`, for the graph that it was compiled from."""
    numbers = collect_dynamic_sizes(graph)
    complete = add_sizes_input(graph, len(numbers))
    return PaddedExecutable.load(device, graph, complete, numbers, dict(parts))


def collect_dynamic_sizes(graph: Graph) -> list[SizeWithExpression]:
    """Returns the distinct symbolic sizes that a padded program takes as run-time input.

    Those of dimensions come first.

    Raises:
        NotPaddedError: A dimension may be larger in a call of smaller sizes.
    """
    found: dict[sympy.Expr, SizeWithExpression] = {}
    for node in graph.module.graph.nodes:
        for size in collect_varying_sizes(node.meta.get(SIZES)):
            if not is_nondecreasing(size.expression):
                raise NotPaddedError(
                    str(node.target),
                    f"its size {size.expression} may grow when an input size shrinks",
                )
            found.setdefault(size.expression, size)
    for size in all_varying_sizes(graph):
        found.setdefault(size.expression, size)
    return [size for expression, size in found.items() if expression.free_symbols]


def is_nondecreasing(expression: sympy.Expr) -> bool:
    """Returns whether an expression never falls when its symbols, which are not negative, grow."""
    if expression.is_Integer or expression.is_Symbol:
        return True
    if isinstance(expression, sympy.Add):
        return all(map(is_nondecreasing, expression.args))
    if isinstance(expression, sympy.Mul):
        factor, rest = expression.as_coeff_Mul()
        if factor != 1 and not isinstance(rest, sympy.Mul):
            return bool(factor.is_Integer and factor > 0) and is_nondecreasing(rest)
        return all(is_nondecreasing(a) and _is_positive(a) for a in expression.args)
    if isinstance(expression, sympy.Pow):
        return bool(expression.exp.is_Integer and expression.exp > 0) and _grows_from_zero(
            expression.base
        )
    name = type(expression).__name__
    if name in ("FloorDiv", "CleanDiv"):
        numerator, divisor = expression.args
        return bool(divisor.is_Integer and divisor > 0) and is_nondecreasing(numerator)
    return name in ("Max", "Min") and all(map(is_nondecreasing, expression.args))


def _grows_from_zero(expression: sympy.Expr) -> bool:
    return is_nondecreasing(expression) and _is_positive(expression)


def _is_positive(expression: sympy.Expr) -> bool:
    """Returns whether it is not negative; symbols are sizes."""
    if expression.is_Symbol:
        return True
    if expression.is_Number:
        return bool(expression >= 0)
    return all(map(_is_positive, expression.args))


def add_sizes_input(graph: Graph, count: int) -> Graph:
    """Returns a copy of the graph with an int64 input for the run-time sizes."""
    graph = graph.copy()
    body = graph.module.graph
    last = next((n for n in body.nodes if n.op != "placeholder"), body.output_node())
    with body.inserting_before(last):
        place = body.placeholder(NUMBERS)
    with FakeTensorMode():
        place.meta["val"] = torch.empty(count, dtype=torch.int64)
    place.meta |= {SIZES: (count,), STRIDES: (1,)}
    graph.module.recompile()
    added = Input(place.name, Role.ACTIVATION)
    return dataclasses.replace(graph, inputs=(*graph.inputs, added))

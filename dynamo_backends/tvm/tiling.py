"""Contractions computed tile by tile: some rows times some vectors of the output in registers.

For each step of the sum, the vectors of one operand are loaded once and used by all rows, and each
row's element of the other operand is used by all vectors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_backends.tvm.vendor import tvm

_ROWS = 14
_LEAST = 4
"""Columns of a tile are a multiple of this, or there is no tile."""

_ON_STACK = 256
"""So many numbers TVM keeps on the stack, which LLVM then puts into registers."""


@dataclass(frozen=True)
class Contraction:
    """A block that sums products of two operands.

    Attributes:
        vector: Position of the loop along which one operand's elements lie together.
        row: Position of the loop that the other operand alone depends on; None if there is none.
        spatial: Positions of the loops over the output.
        summed: Positions of the loops of the sum.
    """

    vector: int
    row: int | None
    spatial: tuple[int, ...]
    summed: tuple[int, ...]


def find_contraction(plan: Any, block: Any) -> Contraction | None:
    """Finds how a block contracts two operands; None if tiles do not help."""
    statement = plan.get(block)
    operands = _operands(statement)
    loops = plan.get_loops(block)
    if operands is None or len(loops) != len(statement.iter_vars):
        return None
    variables = [axis.var for axis in statement.iter_vars]
    spatial = tuple(i for i, axis in enumerate(statement.iter_vars) if int(axis.iter_type) == 0)
    summed = tuple(i for i in range(len(variables)) if i not in spatial)
    extents = [int(plan.get(loop).extent) for loop in loops]
    best: Contraction | None = None
    for one, other in (operands, operands[::-1]):
        last = one.indices[-1]
        along = [i for i in spatial if last.same_as(variables[i])]
        if not along or _uses(other, variables[along[0]]):
            continue
        vector = along[0]
        rows = [i for i in spatial if i != vector and not _uses(one, variables[i])]
        rows = [i for i in rows if extents[i] > 1]
        candidate = Contraction(vector, rows[-1] if rows else None, spatial, summed)
        if best is None or _width(extents[vector]) > _width(extents[best.vector]):
            best = candidate
    return best


def _operands(statement: Any) -> tuple[Any, Any] | None:
    """Returns the two operands of `sum[...] = sum[...] + a[...] * b[...]`."""
    body = statement.body
    if not isinstance(body, tvm.tirx.BufferStore) or not isinstance(body.value, tvm.tirx.Add):
        return None
    product = body.value.b
    if not isinstance(product, tvm.tirx.Mul):
        return None
    one, other = _load(product.a), _load(product.b)
    return None if one is None or other is None else (one, other)


def _load(expression: Any) -> Any:
    """The element that an expression reads and at most converts; None if it is another one."""
    while isinstance(expression, tvm.tirx.Cast):
        expression = expression.value
    return expression if isinstance(expression, tvm.ir.TensorLoad) else None


def _uses(load: Any, variable: Any) -> bool:
    found = (tvm.tirx.analysis.undefined_vars(index) for index in load.indices)
    return any(variable.same_as(v) for variables in found for v in variables)


def _width(extent: int) -> int:
    """Returns how many numbers of a dimension fill whole vectors."""
    return max(n for n in (1, 2, 4, 8, 16, 32) if extent % n == 0)


def tile(
    plan: Any, block: Any, contraction: Contraction, size: tuple[int, int], parallel: bool
) -> Any:
    """Orders a contraction's loops; returns the one around a tile.

    Args:
        plan: The schedule.
        block: The contraction.
        contraction: What is known about it.
        size: Rows and columns of a tile.
        parallel: Whether tiles are computed in several threads.
    """
    loops = list(plan.get_loops(block))
    rows, width = size
    vector_out, vector_in = plan.split(loops[contraction.vector], factors=[None, width])
    outer = [
        loops[i] for i in contraction.spatial if i not in (contraction.row, contraction.vector)
    ]
    # Output channels or columns go before the rest, so that one operand's part stays cached.
    order = [*outer[:1], vector_out, *outer[1:]]
    if contraction.row is None:
        inside: list[Any] = []
    else:
        row_out, row_in = plan.split(loops[contraction.row], factors=[None, rows])
        order.append(row_out)
        inside = [row_in]
    sums = [loops[i] for i in contraction.summed]
    plan.reorder(*order, *sums, *inside, vector_in)
    around = order.pop()
    if not order:
        around, inner_loop = plan.split(around, factors=[None, 1])
        order, around = [around], inner_loop
    outside = plan.fuse(*order)
    if parallel:
        plan.parallel(outside)
    # Before the sum is split from its start: afterwards loops may not be changed any more.
    plan.vectorize(vector_in)
    for loop in inside:
        plan.unroll(loop)
    plan.decompose_reduction(block, sums[0])
    return around


def keep_vectors_together(plan: Any, block: Any, contraction: Contraction) -> None:
    """Gives a contraction's result the order of dimensions in which a tile's vectors are whole."""
    statement = plan.get(block)
    variable = statement.iter_vars[contraction.vector].var
    indices = [r.min for r in statement.writes[0].region]
    (place,) = [i for i, index in enumerate(indices) if index.same_as(variable)]

    def last(*index: Any) -> list[Any]:
        return [*index[:place], *index[place + 1 :], index[place]]

    if place != len(indices) - 1:
        plan.transform_layout(block, ("write", 0), last)


def output_size(plan: Any, block: Any, contraction: Contraction) -> tuple[int, int]:
    """Rows and columns of a contraction's output."""
    extents = [int(plan.get(loop).extent) for loop in plan.get_loops(block)]
    return 1 if contraction.row is None else extents[contraction.row], extents[contraction.vector]


def tile_sizes(rows: int, columns: int, lanes: int) -> list[tuple[int, int]]:
    """Rows and columns of tiles that divide the output, those first that fill registers best.

    Args:
        rows: Rows of the output.
        columns: Columns of the output; vectors lie along them.
        lanes: Numbers in one vector. Processors with vectors of 16 have 32 of them, others 16.

    Raises:
        ValueError: No tile fits.
    """
    registers = 28 if lanes >= 16 else 12
    found: list[tuple[float, tuple[int, int]]] = []
    for width in (n for n in _divisors(columns, _ON_STACK) if n % _LEAST == 0):
        vectors = -(-width // lanes)
        for height in _divisors(rows, _ROWS):
            if vectors * height > registers or width * height > _ON_STACK:
                continue
            # Loads for each multiplication, and lanes that stay empty.
            useful = width / (vectors * lanes)
            value = useful * (vectors * height) / (vectors + height)
            found.append((value, (height, width)))
    if not found:
        raise ValueError(f"{columns} columns do not make whole vectors")
    return [size for _, size in sorted(found, key=lambda entry: -entry[0])]


def _divisors(number: int, limit: int) -> Sequence[int]:
    return [n for n in range(1, min(number, limit) + 1) if number % n == 0]

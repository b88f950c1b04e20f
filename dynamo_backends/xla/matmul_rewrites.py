"""Rewrites the matrix products of every traced program before XLA compiles it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core

from dynamo_backends.xla.repeated_operands import (
    POINTWISE,
    trace_replacement_eqns,
    unbatch_repeated_operands,
)


# torch multiplies by the transpose of a linear layer's weight. XLA folds most of these transposes
# into the product, but not always: a product with a single row and a bias copies the weight at
# every call, which takes fourteen times as long for 2048 x 2048. So they are folded here.
def fold_transposes(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same program; products without batch dimensions contract their operands untransposed.

    Transposes that nobody reads any more are left for the next pass to drop.
    """
    jaxpr = program.jaxpr
    producer = {v: e for e in jaxpr.eqns for v in e.outvars}
    eqns = [
        _fold(eqn, producer) if eqn.primitive.name == "dot_general" else eqn for eqn in jaxpr.eqns
    ]
    return core.ClosedJaxpr(jaxpr.replace(eqns=eqns), program.consts)


def _fold(eqn: Any, producer: dict[core.Var, Any]) -> Any:
    contracted, batch = eqn.params["dimension_numbers"]
    if batch[0]:
        return eqn
    operands, dims = list(eqn.invars), list(contracted)
    for i, var in enumerate(eqn.invars):
        source = producer.get(var) if isinstance(var, core.Var) else None
        if source is None or source.primitive.name != "transpose":
            continue
        order = source.params["permutation"]
        free = [d for k, d in enumerate(order) if k not in dims[i]]
        if free == sorted(free):  # else the result's dimensions would change places
            operands[i] = source.invars[0]
            dims[i] = tuple(order[d] for d in dims[i])
    return eqn.replace(
        invars=operands, params={**eqn.params, "dimension_numbers": (tuple(dims), batch)}
    )


def simplify_products(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Rewrites matrix products of a jaxpr: no repeats, transposes or needless reshapes."""
    return drop_reshapes(fold_transposes(unbatch_repeated_operands(program)))


Shape = tuple[int, ...]


def drop_reshapes(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Removes a reshape and its inverse around pointwise equations.

    Equations that nobody reads any more are left for the next pass to drop.
    """
    jaxpr = program.jaxpr
    before = _shapes_before(jaxpr.eqns)
    moved = _between(jaxpr.eqns, before)
    if not moved:
        return program
    eqns: list[Any] = []
    unshaped: dict[core.Var, Any] = {}  # the same numbers, in the shape before the reshape
    equal: dict[core.Var, Any] = {}

    def renamed(atoms: Sequence[Any]) -> list[Any]:
        return [equal.get(a, a) if isinstance(a, core.Var) else a for a in atoms]

    for eqn in jaxpr.eqns:
        result = eqn.outvars[0] if len(eqn.outvars) == 1 else None
        if result in before and _is_reshape(eqn):
            (unshaped[result],) = renamed(eqn.invars)
        if result not in moved:
            eqns.append(eqn.replace(invars=renamed(eqn.invars)))
        elif _is_reshape(eqn):
            equal[result] = unshaped[eqn.invars[0]]
        else:
            operands = [unshaped[a] if _has_shape(a) else a for a in eqn.invars]
            replacement = _reshaped_after(eqn.replace(invars=operands))
            unshaped[result] = replacement[0].outvars[0]
            eqns += replacement
    outvars = renamed(jaxpr.outvars)
    return core.ClosedJaxpr(jaxpr.replace(eqns=eqns, outvars=outvars), program.consts)


def _reshaped_after(eqn: Any) -> list[Any]:
    """Returns an equation on operands of another shape, and the reshape of its result."""
    shape = eqn.outvars[0].aval.shape
    return trace_replacement_eqns(
        eqn, lambda *xs: lax.reshape(eqn.primitive.bind(*xs, **eqn.params), shape)
    )


def _shapes_before(eqns: Sequence[Any]) -> dict[core.Var, Shape]:
    """Returns the shapes before reshapes, also of what is computed pointwise from these."""
    found: dict[core.Var, Shape] = {}
    for eqn in eqns:
        if _is_reshape(eqn):
            found[eqn.outvars[0]] = eqn.invars[0].aval.shape
        elif eqn.primitive.name in POINTWISE and len(eqn.outvars) == 1:
            operands = [a for a in eqn.invars if _has_shape(a)]
            shapes = {found.get(a) if isinstance(a, core.Var) else None for a in operands}
            shape = shapes.pop() if len(shapes) == 1 else None
            if shape is not None:
                found[eqn.outvars[0]] = shape
    return found


def _between(eqns: Sequence[Any], before: Mapping[core.Var, Shape]) -> set[core.Var]:
    """Results of reshapes that give what they read the shape it had, and what is before those."""
    found: set[core.Var] = set()
    for eqn in reversed(eqns):
        if len(eqn.outvars) != 1:
            continue
        (result,) = eqn.outvars
        if _is_reshape(eqn):
            if before.get(eqn.invars[0]) == result.aval.shape:
                found |= {result, eqn.invars[0]}
            else:
                found.discard(result)
        elif result in found:
            found |= {a for a in eqn.invars if _has_shape(a)}
    return found


def _is_reshape(eqn: Any) -> bool:
    return (
        eqn.primitive.name == "reshape"
        and eqn.params.get("dimensions") is None
        and isinstance(eqn.invars[0], core.Var)
    )


def _has_shape(atom: Any) -> bool:
    return bool(atom.aval.shape)


FEW = 32
"""Largest number of rows of a skinny product."""

LARGE = 1 << 19
"""Bytes of a matrix for which this pays."""


@dataclass(frozen=True)
class _Product:
    """A product of rows and a matrix whose last dimension is contracted.

    Attributes:
        eqn: The equation.
        matrix: Which operand is the matrix.
        rows: How many rows the other one has.
    """

    eqn: Any
    matrix: int
    rows: int

    @property
    def avals(self) -> list[Any]:
        """Shape and dtype of both operands."""
        return [v.aval for v in self.eqn.invars]


def split_skinny(program: core.ClosedJaxpr, threads: int) -> core.ClosedJaxpr:
    """Splits large products of few rows into a batch of smaller ones.

    Args:
        program: After `products.simplify_products`.
        threads: Largest number of parts that are read at once.
    """
    eqns: list[Any] = []
    for eqn in program.jaxpr.eqns:
        product = _skinny(eqn)
        parts = 1 if product is None else _parts(product, threads)
        if product is None or parts == 1:
            eqns.append(eqn)
        else:
            eqns += trace_replacement_eqns(eqn, _in_parts(product, parts))
    return core.ClosedJaxpr(program.jaxpr.replace(eqns=eqns), program.consts)


def _skinny(eqn: Any) -> _Product | None:
    if eqn.primitive.name != "dot_general":
        return None
    contracted, batch = eqn.params["dimension_numbers"]
    if batch[0] or len(contracted[0]) != 1:
        return None
    x, y = (v.aval for v in eqn.invars)
    for matrix, other, dims in ((1, x, contracted[1]), (0, y, contracted[0])):
        aval = eqn.invars[matrix].aval
        rows = other.size // max(aval.shape[-1], 1) if aval.ndim == 2 else 0
        is_large = aval.size * aval.dtype.itemsize >= LARGE
        if dims == (1,) and is_large and 1 <= rows <= FEW and _is_plain(x, y, eqn.outvars[0].aval):
            return _Product(eqn, matrix, rows)
    return None


def _is_plain(*avals: Any) -> bool:
    return all(a.dtype == np.float32 for a in avals)


def _parts(product: _Product, threads: int) -> int:
    """Returns how many: a divisor of the matrix's rows."""
    aval = product.avals[product.matrix]
    most = min(threads, 4 * aval.size * aval.dtype.itemsize // LARGE)
    return next(n for n in range(max(most, 1), 0, -1) if aval.shape[0] % n == 0)


def _in_parts(product: _Product, parts: int) -> Callable[..., jax.Array]:
    params = product.eqn.params
    place = 1 - product.matrix
    (dim,) = params["dimension_numbers"][0][place]
    shape = product.eqn.outvars[0].aval.shape

    def multiply(*operands: jax.Array) -> jax.Array:
        matrix, x = operands[product.matrix], operands[place]
        outputs, features = matrix.shape
        order = [*(d for d in range(x.ndim) if d != dim), dim]
        x = lax.reshape(lax.transpose(x, order), (product.rows, features))
        # Not broadcast: what XLA fused with that would compute NaN (see `repeated`).
        repeated = lax.concatenate([lax.expand_dims(x, (0,))] * parts, 0)
        result = lax.dot_general(
            lax.reshape(matrix, (parts, outputs // parts, features)),
            repeated,
            (((2,), (2,)), ((0,), (0,))),
            precision=params["precision"],
            preferred_element_type=params["preferred_element_type"],
        )
        result = lax.reshape(result, (outputs, product.rows))
        return lax.reshape(result.T if product.matrix == 1 else result, shape)

    return multiply

"""Reshapes around pointwise operations.

A linear layer multiplies a matrix, and its activation has three dimensions. XLA gives the
activation the matrix's shape, too, but without its algebraic simplifier it leaves two reshapes in
that loop. Such a loop does not write its result over its operand, which is the largest tensor of a
transformer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jax import lax
from jax.extend import core

from dynamo_backends.xla.equations import in_place_of
from dynamo_backends.xla.repeated import POINTWISE

Shape = tuple[int, ...]


def drop_reshapes(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Returns the same program; what is pointwise between a reshape and its inverse needs neither.

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
    return in_place_of(eqn, lambda *xs: lax.reshape(eqn.primitive.bind(*xs, **eqn.params), shape))


def _shapes_before(eqns: Sequence[Any]) -> dict[core.Var, Shape]:
    """Of what is reshaped, or computed pointwise from that: the shape before the reshape."""
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

"""Products of a batch with a matrix that is the same for all of it, as products without a batch.

`torch.matmul` and `expand` repeat a matrix along the batch. One product with all rows reads it
once. And XLA's CPU client (jaxlib 0.10.2) reads memory that is not its own, with NaN or a crash for
a result, where it fuses a reduction, its repetition along the whole batch, and a product of which
that is the second operand.
"""

import itertools
import math
import operator
from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from dynamo_backends.xla.equations import in_place_of

_POINTWISE = frozenset(
    name
    for line in (
        "abs add and cbrt ceil clamp convert_element_type copy cos cosh div eq erf erf_inv erfc",
        "exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul ne",
        "neg nextafter not or pow reduce_precision rem round rsqrt select_n sign sin sinh sqrt",
        "square stop_gradient sub tan tanh xor",
    )
    for name in line.split()
)
_REDUCING = frozenset(
    f"reduce_{name}" for name in ("sum", "max", "min", "prod", "and", "or", "xor")
) | {"argmax", "argmin"}


def drop_repeated(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same program; no product has a second operand that is the same for all of its batch.

    Equations that nobody reads any more are left for the next pass to drop.
    """
    jaxpr = program.jaxpr
    same: dict[core.Var, frozenset[int]] = {}  # along which dimensions all entries are the same
    eqns: list[Any] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general" and _is_repeated(eqn, same):
            eqns += in_place_of(eqn, _without_batch(eqn))
        else:
            eqns.append(eqn)
        if len(eqn.outvars) == 1:
            same[eqn.outvars[0]] = frozenset(_same_along(eqn, same))
    return core.ClosedJaxpr(jaxpr.replace(eqns=eqns), program.consts)


def _is_repeated(eqn: Any, same: dict[core.Var, frozenset[int]]) -> bool:
    _, (_, batch) = eqn.params["dimension_numbers"]
    second = eqn.invars[1]
    return math.prod(second.aval.shape[d] for d in batch) > 1 and {*batch} <= same.get(
        second, frozenset()
    )


def _without_batch(eqn: Any) -> Any:
    params = eqn.params
    (left, right), (rows, batch) = params["dimension_numbers"]

    def multiply(x: jax.Array, y: jax.Array) -> jax.Array:
        limits = [1 if d in batch else size for d, size in enumerate(y.shape)]
        matrix = lax.squeeze(lax.slice(y, [0] * y.ndim, limits), batch)
        kept = [d for d in range(y.ndim) if d not in batch]
        result = lax.dot_general(
            x,
            matrix,
            ((left, tuple(kept.index(d) for d in right)), ((), ())),
            precision=params["precision"],
            preferred_element_type=params["preferred_element_type"],
        )
        # Its dimensions: those of x that are not contracted, the batch among them, and y's.
        free = [d for d in range(x.ndim) if d not in left]
        order = [*map(free.index, rows), *(k for k, d in enumerate(free) if d not in rows)]
        return lax.transpose(result, [*order, *range(len(free), result.ndim)])

    return multiply


def _same_along(eqn: Any, same: dict[core.Var, frozenset[int]]) -> Collection[int]:
    """Along which dimensions all entries of an equation's result are known to be the same."""
    name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
    given = [_of_operand(atom, same, len(shape)) for atom in eqn.invars]
    if name in _POINTWISE:
        return set(range(len(shape))).intersection(*given)
    if not eqn.invars or not isinstance(eqn.invars[0], core.Var):
        return ()
    aval: Any = eqn.invars[0].aval
    source, known, operand = aval.shape, given[0], eqn.params
    if name == "broadcast_in_dim":
        places = operand["broadcast_dimensions"]
        varying = {p for d, p in enumerate(places) if d not in known and source[d] == shape[p]}
        return set(range(len(shape))) - varying
    if name == "transpose":
        return {k for k, d in enumerate(operand["permutation"]) if d in known}
    if name == "squeeze" or name in _REDUCING:
        gone = operand["dimensions" if name == "squeeze" else "axes"]
        kept = [d for d in range(len(source)) if d not in gone]
        return {k for k, d in enumerate(kept) if d in known}
    if name == "reshape" and operand.get("dimensions") is None:
        return _reshaped(source, shape, known)
    return ()


def _of_operand(atom: Any, same: dict[core.Var, frozenset[int]], rank: int) -> Collection[int]:
    if isinstance(atom, core.Literal) or not atom.aval.shape:
        return range(rank)  # one number for all entries
    return same.get(atom, frozenset())


def _reshaped(source: Sequence[int], shape: Sequence[int], known: Collection[int]) -> set[int]:
    """Those of the new dimensions that are made of nothing but known old ones."""
    before, after = ([*itertools.accumulate(s, operator.mul, initial=1)] for s in (source, shape))
    found = set()
    for k, size in enumerate(shape):
        begin, end = after[k], after[k + 1]
        made_of = [d for d in range(len(source)) if before[d] < end and before[d + 1] > begin]
        if size > 1 and all(d in known or source[d] == 1 for d in made_of):
            found.add(k)
    return found

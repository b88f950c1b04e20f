"""Products with an operand that is the same along a dimension.

`torch.matmul` and `expand` repeat a matrix along the batch. One product with all rows reads it
once.

And XLA's CPU client (jaxlib 0.10.2) has YNNPACK compute a product together with what makes its
operands and what is made of its result. Where the second operand is repeated along a dimension, and
a reduction is in that too, it reads memory that is not its own: results are wrong, NaN, or it
crashes. Programs with such operands are compiled with products by themselves.
"""

import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

POINTWISE = frozenset(
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
) | {"argmax", "argmin", "reduce"}


def unbatch_repeated_operands(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Rewrites batched products whose right operand repeats to one unbatched product.

    Equations that nobody reads any more are left for the next pass to drop.
    """
    jaxpr = program.jaxpr
    same = _found_same(jaxpr)
    eqns: list[Any] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general" and _is_repeated(eqn, same):
            eqns += trace_replacement_eqns(eqn, _without_batch(eqn))
        else:
            eqns.append(eqn)
    return core.ClosedJaxpr(jaxpr.replace(eqns=eqns), program.consts)


def may_fuse_products(program: core.ClosedJaxpr) -> bool:
    """Returns whether no product has an operand that is the same along a dimension.

    Bodies of loops are looked at, too, as if nothing were known of what they are given.
    """
    return not _has_repeated_operands(program.jaxpr)


def _has_repeated_operands(jaxpr: core.Jaxpr) -> bool:
    same = _found_same(jaxpr)
    for eqn in jaxpr.eqns:
        is_product = eqn.primitive.name == "dot_general"
        if is_product and any(_repeats(var, same) for var in eqn.invars):
            return True
        if any(map(_has_repeated_operands, _bodies(eqn))):
            return True
    return False


def _bodies(eqn: Any) -> Iterator[core.Jaxpr]:
    """The programs that an equation runs: of loops, branches and calls."""
    for value in eqn.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, core.ClosedJaxpr):
                yield each.jaxpr
            elif isinstance(each, core.Jaxpr):
                yield each


def _repeats(atom: Any, same: Mapping[core.Var, frozenset[int]]) -> bool:
    shape = atom.aval.shape
    return any(shape[d] > 1 for d in _of_operand(atom, same, len(shape)))


def _found_same(jaxpr: core.Jaxpr) -> dict[core.Var, frozenset[int]]:
    """Returns for each result the dimensions along which all its entries are equal."""
    same: dict[core.Var, frozenset[int]] = {}
    for eqn in jaxpr.eqns:
        if len(eqn.outvars) == 1:
            same[eqn.outvars[0]] = frozenset(_same_along(eqn, same))
    return same


def _is_repeated(eqn: Any, same: Mapping[core.Var, frozenset[int]]) -> bool:
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


def _same_along(eqn: Any, same: Mapping[core.Var, frozenset[int]]) -> Collection[int]:
    """Along which dimensions all entries of an equation's result are known to be the same."""
    name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
    every = range(len(shape))
    given = [_of_operand(atom, same, len(shape)) for atom in eqn.invars]
    if name in POINTWISE:
        return set(every).intersection(*given)
    if name == "concatenate":
        return set(every).intersection(*given) - {eqn.params["dimension"]}
    if name == "dot_general":
        return _of_product(eqn, given)
    if not eqn.invars:
        return set(every) - {eqn.params.get("dimension")} if name == "iota" else ()
    return _of_one(name, eqn.params, eqn.invars[0].aval.shape, shape, given[0])


def _of_one(
    name: str, params: Any, source: Sequence[int], shape: Sequence[int], known: Collection[int]
) -> Collection[int]:
    """`_same_along` for what has one operand that matters."""
    if name in ("slice", "rev"):
        return known
    if name == "broadcast_in_dim":
        places = params["broadcast_dimensions"]
        varying = {p for d, p in enumerate(places) if d not in known and source[d] == shape[p]}
        return set(range(len(shape))) - varying
    if name == "transpose":
        return {k for k, d in enumerate(params["permutation"]) if d in known}
    if name == "squeeze" or name in _REDUCING:
        gone = params["dimensions" if name in ("squeeze", "reduce") else "axes"]
        kept = [d for d in range(len(source)) if d not in gone]
        return {k for k, d in enumerate(kept) if d in known}
    if name == "reshape" and params.get("dimensions") is None:
        return _reshaped(source, shape, known)
    return ()


def _of_product(eqn: Any, given: Sequence[Collection[int]]) -> set[int]:
    contracted, batch = eqn.params["dimension_numbers"]
    found = [x in given[0] and y in given[1] for x, y in zip(*batch, strict=True)]
    for var, known, *gone in zip(eqn.invars, given, contracted, batch, strict=True):
        free = (d for d in range(var.aval.ndim) if d not in gone[0] and d not in gone[1])
        found += [d in known for d in free]
    return {k for k, is_same in enumerate(found) if is_same}


def _of_operand(atom: Any, same: Mapping[core.Var, frozenset[int]], rank: int) -> Collection[int]:
    if not atom.aval.shape:
        return range(rank)  # one number for all entries
    return same.get(atom, frozenset()) if isinstance(atom, core.Var) else frozenset()


def _reshaped(source: Sequence[int], shape: Sequence[int], known: Collection[int]) -> set[int]:
    """Returns those of the new dimensions that are made of nothing but known old ones."""
    before, after = ([*itertools.accumulate(s, operator.mul, initial=1)] for s in (source, shape))
    found = set()
    for k, size in enumerate(shape):
        begin, end = after[k], after[k + 1]
        made_of = [d for d in range(len(source)) if before[d] < end and before[d + 1] > begin]
        if size > 1 and all(d in known or source[d] == 1 for d in made_of):
            found.add(k)
    return found


def trace_replacement_eqns(eqn: Any, function: Callable[..., jax.Array]) -> list[Any]:
    """Traces a function to equations that replace `eqn`, with its inputs and outputs.

    Args:
        eqn: Has one result.
        function: Takes what the equation takes.
    """
    given = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    traced = jax.make_jaxpr(function)(*given).jaxpr
    names = dict(zip((*traced.invars, *traced.outvars), (*eqn.invars, *eqn.outvars), strict=True))

    def renamed(atoms: Any) -> list[Any]:
        return [names.get(a, a) if isinstance(a, core.Var) else a for a in atoms]

    return [e.replace(invars=renamed(e.invars), outvars=renamed(e.outvars)) for e in traced.eqns]

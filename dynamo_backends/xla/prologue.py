"""Takes what depends on weights alone out of a program, to be computed once per binding.

Lowerings transform weights wherever that makes a faster program: folded batch norms, Winograd
transforms, transposed or block-diagonal matrices. Here the traced program is split in two: a
prologue of equations that need only weights, and the main program, which takes the prologue's
results. Weights that the main program reads untransformed are passed on without a copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core

# Equations that only make data larger are repeated in the main program instead of stored.
_EXPANDING = frozenset({"broadcast_in_dim", "iota", "reshape", "squeeze", "expand_dims"})
# XLA folds these into a matrix product, so that the weight itself can be read.
_FOLDED_INTO_DOT = frozenset({"transpose", "reshape", "squeeze"})


@dataclass(frozen=True)
class SplitProgram:
    """A traced program in two parts.

    Attributes:
        prologue: From `transformed` weights to prepared arrays; None if nothing is prepared.
        main: From (`untouched` weights, prepared arrays, `activations`) to the outputs.
        transformed: Positions, among the weights, of the prologue's inputs.
        untouched: Positions, among the weights, that the main program reads as they are.
        activations: Positions, among the activations, that the main program reads.
    """

    prologue: core.ClosedJaxpr | None
    main: core.ClosedJaxpr
    transformed: tuple[int, ...]
    untouched: tuple[int, ...]
    activations: tuple[int, ...]


def split_prologue(program: core.ClosedJaxpr, weights: int, prepare: bool = True) -> SplitProgram:
    """Splits a jaxpr into a prologue that needs only weights, and the main program.

    Args:
        program: Its first `weights` inputs are weights, the others activations.
        weights: How many inputs are weights.
        prepare: Whether anything may be computed once per binding; else the main program reads all
            weights as they are.
    """
    jaxpr = program.jaxpr
    weight_vars = jaxpr.invars[:weights]
    from_weights = _derived_from(jaxpr, weight_vars)
    producer = {v: e for e in jaxpr.eqns for v in e.outvars}
    needed = _needed_by_main(jaxpr, from_weights)
    if prepare:
        boundary = _pull_back(needed, producer, set(weight_vars), _read_by_dot_only(jaxpr))
    else:
        boundary = dict.fromkeys(_slice(jaxpr.eqns, jaxpr.outvars, set())[1] & set(weight_vars))
    prepared = [v for v in boundary if v in producer]
    untouched = tuple(i for i, v in enumerate(weight_vars) if v in boundary)

    main_inputs = [weight_vars[i] for i in untouched] + prepared
    main_eqns, read = _slice(jaxpr.eqns, jaxpr.outvars, set(main_inputs))
    acts = jaxpr.invars[weights:]
    activations = tuple(i for i, v in enumerate(acts) if v in read)
    main_inputs += [acts[i] for i in activations]
    main = _close(program, main_inputs, list(jaxpr.outvars), main_eqns)

    prologue: core.ClosedJaxpr | None = None
    transformed: tuple[int, ...] = ()
    if prepared:
        eqns, read = _slice(jaxpr.eqns, prepared, set())
        transformed = tuple(i for i, v in enumerate(weight_vars) if v in read)
        prologue = _close(program, [weight_vars[i] for i in transformed], list(prepared), eqns)
    return SplitProgram(prologue, main, transformed, untouched, activations)


def _vars(atoms: Sequence[Any]) -> list[core.Var]:
    return [a for a in atoms if isinstance(a, core.Var)]


def _derived_from(jaxpr: core.Jaxpr, weights: Sequence[core.Var]) -> set[core.Var]:
    """Variables that follow from weights (at least one) and constants alone."""
    known: set[core.Var] = set(weights)
    constant: set[core.Var] = set(jaxpr.constvars)
    for eqn in jaxpr.eqns:
        inputs = _vars(eqn.invars)
        if eqn.effects or not all(v in known or v in constant for v in inputs):
            continue
        target = known if any(v in known for v in inputs) else constant
        target.update(eqn.outvars)
    return known


def _needed_by_main(jaxpr: core.Jaxpr, from_weights: set[core.Var]) -> dict[core.Var, None]:
    needed: dict[core.Var, None] = {}
    for eqn in jaxpr.eqns:
        if not any(v in from_weights for v in eqn.outvars):
            needed.update(dict.fromkeys(v for v in _vars(eqn.invars) if v in from_weights))
    needed.update(dict.fromkeys(v for v in _vars(jaxpr.outvars) if v in from_weights))
    return needed


def _read_by_dot_only(jaxpr: core.Jaxpr) -> set[core.Var]:
    by_dot: set[core.Var] = set()
    others = set(_vars(jaxpr.outvars))
    for eqn in jaxpr.eqns:
        (by_dot if eqn.primitive.name == "dot_general" else others).update(_vars(eqn.invars))
    return by_dot - others


def _pull_back(
    needed: dict[core.Var, None],
    producer: dict[core.Var, Any],
    weights: set[core.Var],
    into_dot: set[core.Var],
) -> dict[core.Var, None]:
    """Moves the boundary to before equations that only make data larger, or that cost nothing."""
    boundary: dict[core.Var, None] = {}
    pending = list(needed)
    seen = set(pending)
    while pending:
        var = pending.pop(0)
        eqn = producer.get(var)
        if var in weights or eqn is None:
            boundary[var] = None
            continue
        free = var in into_dot and eqn.primitive.name in _FOLDED_INTO_DOT
        if not free and not _only_expands(eqn):
            boundary[var] = None
            continue
        for source in _vars(eqn.invars):
            if source not in seen:
                seen.add(source)
                pending.append(source)
    return boundary


def _only_expands(eqn: Any) -> bool:
    if eqn.primitive.name not in _EXPANDING:
        return False
    size = sum(_bytes(v.aval) for v in _vars(eqn.invars))
    return sum(_bytes(v.aval) for v in eqn.outvars) >= size


def _bytes(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize


def _slice(
    eqns: Sequence[Any], results: Sequence[Any], given: set[core.Var]
) -> tuple[list[Any], set[core.Var]]:
    """The equations that `results` need when `given` are known, and all variables they read."""
    wanted = {v for v in _vars(results) if v not in given}
    read = set(_vars(results))
    kept = []
    for eqn in reversed(eqns):
        if eqn.effects or any(v in wanted for v in eqn.outvars):
            kept.append(eqn)
            inputs = _vars(eqn.invars)
            read.update(inputs)
            wanted.update(v for v in inputs if v not in given)
    return kept[::-1], read


def _close(
    program: core.ClosedJaxpr, inputs: list[Any], outputs: list[Any], eqns: list[Any]
) -> core.ClosedJaxpr:
    jaxpr = program.jaxpr.replace(
        invars=inputs, outvars=outputs, eqns=eqns, debug_info=_debug_info(len(inputs), len(outputs))
    )
    return core.ClosedJaxpr(jaxpr, program.consts)


def _debug_info(inputs: int, outputs: int) -> core.DebugInfo:
    return core.DebugInfo("dynamo_backends", "program", ("",) * inputs, ("",) * outputs)


def with_outputs(program: core.ClosedJaxpr, order: Sequence[int]) -> core.ClosedJaxpr:
    """Returns a program that returns its outputs in another order."""
    jaxpr = program.jaxpr
    outputs = [jaxpr.outvars[i] for i in order]
    return _close(program, list(jaxpr.invars), outputs, list(jaxpr.eqns))


def as_function(program: core.ClosedJaxpr) -> Any:
    """Returns a function that evaluates a program on jax values; returns a list."""
    return core.jaxpr_as_fun(program)


def avals(program: core.ClosedJaxpr) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a program's inputs."""
    return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in program.jaxpr.invars]

"""Puts other equations in the place of one."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core


def in_place_of(eqn: Any, function: Callable[..., jax.Array]) -> list[Any]:
    """Returns the equations of a function that computes what an equation does, with its variables.

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

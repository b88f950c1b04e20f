"""What is done to every traced program for its matrix products, before XLA compiles it."""

from typing import Any

from jax.extend import core

from dynamo_backends.xla.repeated import drop_repeated
from dynamo_backends.xla.reshapes import drop_reshapes


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
    """The same program; its products read what they multiply once, where it is and as it is."""
    return drop_reshapes(fold_transposes(drop_repeated(program)))

"""What is done to every traced program for its matrix products, before XLA compiles it."""

from jax.extend import core

from dynamo_backends.xla.repeated import drop_repeated
from dynamo_backends.xla.reshapes import drop_reshapes
from dynamo_backends.xla.transposes import fold_transposes


def simplify_products(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same program; its products read what they multiply once, where it is and as it is."""
    return drop_reshapes(fold_transposes(drop_repeated(program)))

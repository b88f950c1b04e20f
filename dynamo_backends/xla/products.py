"""What is done to matrix products in every traced program, before XLA compiles it."""

from jax.extend import core

from dynamo_backends.xla.repeated import drop_repeated
from dynamo_backends.xla.transposes import fold_transposes


def simplify_products(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same program; its products read what they multiply once, and where it is."""
    return fold_transposes(drop_repeated(program))

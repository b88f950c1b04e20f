"""Lowers operators on padded arrays, of which only a part is a tensor's elements.

*Padding holds garbage, NaN included; whoever mixes positions along a padded dimension masks its
inputs first.* What that means for each operator is declared in the modules `rules_*`; an operator
that declares nothing is not padded, and its graph is compiled for each set of shapes.
"""

from dynamo_backends.xla.lowering.padded import (
    rules_attention,
    rules_contraction,
    rules_creation,
    rules_images,
    rules_indexing,
    rules_normalization,
    rules_reduction,
    rules_shape,
    rules_sorting,
)

__all__ = [
    "rules_attention",
    "rules_contraction",
    "rules_creation",
    "rules_images",
    "rules_indexing",
    "rules_normalization",
    "rules_reduction",
    "rules_shape",
    "rules_sorting",
]

"""The lowering of ATen to nvFuser: one file per operator family.

Importing this package fills the table in `registry`.
"""

from dynamo_backends.nvfuser.lowering import (
    activation,
    arithmetic,
    batch_norm,
    creation,
    matmul,
    normalization,
    pointwise,
    reduction,
    shape,
)

__all__ = [
    "activation",
    "arithmetic",
    "batch_norm",
    "creation",
    "matmul",
    "normalization",
    "pointwise",
    "reduction",
    "shape",
]

"""The lowering of ATen to nvFuser: one file per operator family.

Importing this package fills the table in `registry`.
"""

from dynamo_backends.nvfuser.lowering import arithmetic, normalization, pointwise, reduction, shape

__all__ = [
    "arithmetic",
    "batch_norm",
    "matmul",
    "normalization",
    "pointwise",
    "reduction",
    "shape",
]

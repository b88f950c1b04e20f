"""The lowering of ATen to XLA: one file per operator family.

Importing this package fills the table in `registry`.
"""

from dynamo_backends.xla.lowering import (
    attention,
    creation,
    indexing,
    matmul,
    pointwise,
    shape,
    sorting,
)

__all__ = [
    "attention",
    "creation",
    "indexing",
    "matmul",
    "pointwise",
    "shape",
    "sorting",
]

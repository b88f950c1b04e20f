"""The lowering of ATen to XLA: one file per operator family.

Importing this package fills the table in `registry`.
"""

import dynamo_backends.xla.jax_import  # noqa: F401 - before jax
from dynamo_backends.xla.lowering import (
    arithmetic,
    attention,
    batch_norm,
    bessel,
    collectives,
    complex,
    convolution,
    creation,
    grid_sampling,
    indexing,
    linalg,
    linalg_lu,
    matmul,
    normalization,
    padding,
    pointwise,
    pooling,
    recurrent,
    reduction,
    shape,
    sorting,
    special,
    strided,
    upsampling,
)

__all__ = [
    "arithmetic",
    "attention",
    "batch_norm",
    "bessel",
    "collectives",
    "complex",
    "convolution",
    "creation",
    "grid_sampling",
    "indexing",
    "linalg",
    "linalg_lu",
    "matmul",
    "normalization",
    "padding",
    "pointwise",
    "pooling",
    "recurrent",
    "reduction",
    "shape",
    "sorting",
    "special",
    "strided",
    "upsampling",
]

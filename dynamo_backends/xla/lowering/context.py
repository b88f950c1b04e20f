"""Gives lowerings the context of a call beyond its arguments."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import fx

from dynamo_backends.interface.errors import LoweringError
from dynamo_backends.xla.dtypes import to_jax


@dataclass(frozen=True)
class LoweringOptions:
    """Holds the options of the lowering: platform, precision, layout and partitioning.

    Attributes:
        platform: "cpu", "cuda" or "tpu".
        matmul_precision: For float32 products: "highest" (float32), "high" (three bfloat16 or one
            TF32 pass) or "default" (whatever the device does fastest).
        convolution_precision: The same for convolutions; empty: as for products.
        channels_last: Store convolutional activations channels last. XLA chooses layouts itself on
            GPU and TPU; on the CPU it does not, and channels last is faster.
        partitioned: XLA splits the program over several devices. Convolutions are its own then,
            which it can split, or run on parts of the batch.
        grid: Devices of which each has a part of the batch (`jax.sharding.Mesh`).
    """

    platform: str = "cpu"
    matmul_precision: str = "highest"
    convolution_precision: str = ""
    channels_last: bool = True
    partitioned: bool = False
    grid: Any = None


@dataclass(frozen=True)
class Context:
    """The call that is being lowered.

    Attributes:
        node: The call.
        options: What is lowered.
        saved: What lowerings of calls before it keep for others of the same graph.
    """

    node: fx.Node
    options: LoweringOptions
    saved: dict[fx.Node, Any] = field(default_factory=dict)

    @property
    def out(self) -> Any:
        """The node's `meta["val"]`: a fake tensor, a tuple of them, or a Python number."""
        return self.node.meta["val"]

    @property
    def out_dtype(self) -> jnp.dtype:
        """Element type of the (first) result."""
        out = self.out
        return to_jax((out if isinstance(out, torch.Tensor) else out[0]).dtype)

    @property
    def precision(self) -> jax.lax.Precision:
        """Precision for float32 matrix products."""
        return jax.lax.Precision(self.options.matmul_precision)

    @property
    def convolution_precision(self) -> jax.lax.Precision:
        """Precision for float32 convolutions."""
        options = self.options
        return jax.lax.Precision(options.convolution_precision or options.matmul_precision)

    def refuse(self, reason: str) -> LoweringError:
        """Returns the error to raise when this call turns out not to be lowerable."""
        return LoweringError(self.node.name, str(self.node.target), reason)

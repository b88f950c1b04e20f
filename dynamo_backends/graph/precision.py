"""Tells whether torch's settings allow TF32 or reduced precision for float32 products.

TF32 has the range of float32 and ten bits of its mantissa. torch allows it for convolutions by
default and for matrix products only when asked
(https://docs.pytorch.org/docs/stable/notes/cuda.html#tf32-on-ampere).
"""

from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten

ROUNDING = 2**-11
"""What it may change a factor by, relative."""

_CONVOLUTIONS = frozenset({aten.convolution.default, aten.convolution_backward.default})
_PRODUCTS = frozenset(
    {
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_efficient_attention_backward.default,
        aten.addmm.default,
        aten.baddbmm.default,
        aten.bmm.default,
        aten.mm.default,
    }
)


@dataclass(frozen=True)
class Tf32Settings:
    """Whether torch allows TF32, for matrix products and for convolutions.

    Attributes:
        products: Matrix products.
        convolutions: Convolutions.
    """

    products: bool
    convolutions: bool

    @property
    def allowed_everywhere(self) -> bool:
        """Returns whether TF32 is allowed for both, for runtimes with a single switch."""
        return self.products and self.convolutions


def float32_matmul_precision() -> str:
    """Returns torch's float32 matmul precision: "highest", "high" or "medium".

    As `torch.get_float32_matmul_precision`, which raises once precision was set for one backend
    alone (`torch.backends.cuda.matmul.fp32_precision`).
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "high" if read_tf32_settings().products else "highest"


def read_tf32_settings() -> Tf32Settings:
    """Reads which operations torch's settings let use TF32 now, without changing them."""
    return Tf32Settings(
        products=torch.backends.cuda.matmul.fp32_precision == "tf32",
        convolutions=torch.backends.cudnn.conv.fp32_precision == "tf32",  # type: ignore[attr-defined]
    )


def allows_tf32(op: Any) -> bool:
    """Returns whether torch now lets an operator use TF32 on GPUs."""
    if op in _CONVOLUTIONS:
        return read_tf32_settings().convolutions
    return op in _PRODUCTS and read_tf32_settings().products


PRODUCTS = frozenset(
    {
        aten.mm.default, aten.bmm.default, aten.matmul.default, aten.linear.default,
        aten.addmm.default, aten.baddbmm.default, aten.convolution.default, aten.conv1d.default,
        aten.conv2d.default, aten.conv3d.default,
    }
)  # fmt: skip
"""Products and convolutions: calls that autocast runs in reduced precision, except attention."""

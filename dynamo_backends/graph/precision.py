"""What is computed in reduced precision where a user admits that."""

import torch

aten = torch.ops.aten

PRODUCTS = frozenset(
    {
        aten.mm.default, aten.bmm.default, aten.matmul.default, aten.linear.default,
        aten.addmm.default, aten.baddbmm.default, aten.convolution.default, aten.conv1d.default,
        aten.conv2d.default, aten.conv3d.default,
    }
)  # fmt: skip
"""Products and convolutions: calls that autocast runs in reduced precision, except attention."""

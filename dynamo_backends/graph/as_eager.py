"""Taking operators apart into what eager computes, in its order.

torch's own rule for the gradient of softmax multiplies both terms of a difference, and has NaN
where eager has an infinity; that for `frac` gives -0.0 for -0.0, where eager gives 0.0.
"""

import torch
from torch import Tensor


def frac(x: Tensor) -> Tensor:
    """`aten.frac` in simpler operators."""
    return x - x.trunc()


def softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """`aten._softmax_backward_data` in simpler operators.

    Args:
        grad: Gradient of the result.
        output: The result, of the same shape.
        dim: Along which the results add up to 1.
        input_dtype: Of the gradient that is returned.
    """
    wide = torch.promote_types(grad.dtype, torch.float32)
    grad, output = grad.to(wide), output.to(wide)
    inner = (grad * output).sum(dim, keepdim=True)
    return ((grad - inner) * output).to(input_dtype).contiguous()

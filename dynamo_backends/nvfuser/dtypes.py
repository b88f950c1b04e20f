"""Which of torch's element types nvFuser computes with."""

import torch

NAMES = {
    torch.bool: "Bool",
    torch.int32: "Int32",
    torch.int64: "Int",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.float32: "Float",
    torch.float64: "Double",
}
"""Names in nvFuser's `DataType`, of the types that fusions compute with.

It has complex types as well, which are left to eager.
"""


def computing(dtype: torch.dtype) -> torch.dtype:
    """Returns the type in which a value is computed: float32 for the halves, as in eager."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def constant_kind(dtype: torch.dtype) -> str:
    """Returns the name of the type of a number that fills a tensor of `dtype`: Python's own."""
    if dtype.is_floating_point:
        return "Double"
    return "Bool" if dtype == torch.bool else "Int"

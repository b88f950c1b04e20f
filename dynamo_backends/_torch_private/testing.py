"""PyTorch's own database of operators with sample inputs; imported apart, for it takes seconds.

| what | checked |
|---|---|
| `torch.testing._internal.common_methods_invocations.op_db` | 2.13.0 |
| `torch.testing._internal.opinfo.core`: `OpInfo`, `UnaryUfuncInfo`, `BinaryUfuncInfo`, `ReductionOpInfo` | 2.13.0 |

It needs the package expecttest.
"""  # noqa: E501 - a row of a table is one line

from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import (
    BinaryUfuncInfo,
    OpInfo,
    ReductionOpInfo,
    UnaryUfuncInfo,
)

__all__ = ["BinaryUfuncInfo", "OpInfo", "ReductionOpInfo", "UnaryUfuncInfo", "op_db"]

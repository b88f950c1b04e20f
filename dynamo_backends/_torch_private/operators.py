"""Tables of operators: decompositions, kinds, type promotion.

| what | checked |
|---|---|
| `torch._prims_common.elementwise_dtypes`, `ELEMENTWISE_TYPE_PROMOTION_KIND` | 2.11+ |
| `torch._ops`: `OpOverload`, `HigherOrderOperator` | 2.11+ |
| `OpOverload.has_kernel_for_dispatch_key` | 2.11+ |
| `torch._C._dispatch_get_all_op_names`, `_dispatch_has_kernel_for_dispatch_key` | 2.11+ |
| `torch._decomp`: `core_aten_decompositions`, `decomposition_table` | 2.11+ |
| `torch._decomp._core_aten_decompositions_post_autograd` | 2.11+ |
| `torch.utils.flop_counter.flop_registry` | 2.11+ |
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import core_aten_decompositions as core_aten_decompositions
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as _KIND
from torch._prims_common import elementwise_dtypes as elementwise_dtypes

ELEMENTWISE_PROMOTION = {
    "default": _KIND.DEFAULT,
    "int_to_float": _KIND.INT_TO_FLOAT,
    "to_bool": _KIND.ALWAYS_BOOL,
    "complex_to_float": _KIND.COMPLEX_TO_FLOAT,
}


def is_composite(op: OpOverload) -> bool:
    """Returns whether tracing always decomposes an operator (CompositeImplicitAutograd).

    Not one that devices have kernels of their own for, as for silu_backward.
    """
    keys = torch._C.DispatchKey
    has = op.has_kernel_for_dispatch_key
    return bool(has(keys.CompositeImplicitAutograd) and not has(keys.CPU))


def all_operator_names() -> tuple[str, ...]:
    """Returns the names of all operators registered so far, as "aten::softmax.int"."""
    return tuple(torch._C._dispatch_get_all_op_names())


def composite_names() -> frozenset[str]:
    """Returns names of composite operators, with and without overload: "aten.softmax.int"."""
    kind = "CompositeImplicitAutograd"
    names = set()
    for name in all_operator_names():
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, kind):
            namespace, _, rest = name.partition("::")
            packet, _, overload = rest.partition(".")
            names |= {f"{namespace}.{packet}", f"{namespace}.{packet}.{overload or 'default'}"}
    return frozenset(names)


def counts_flops(op: OpOverload) -> bool:
    """Returns whether torch has a FLOP formula for an operator, as for matmuls."""
    from torch.utils.flop_counter import flop_registry

    return op.overloadpacket in flop_registry


@functools.cache
def core_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Returns torch's core ATen decompositions, without those of composite operators.

    Tracing replaces those anyway; looking for them among all operators takes 0.3 seconds.
    """
    from torch._decomp import _core_aten_decompositions_post_autograd

    table: Any = _core_aten_decompositions_post_autograd()
    return dict(table)


def all_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Returns all of torch's decompositions; where two exist, the core one."""
    from torch._decomp import decomposition_table

    core = core_aten_decompositions()
    return {**{k: v for k, v in decomposition_table.items() if isinstance(k, OpOverload)}, **core}

"""Every private torch API that this package uses, in one place.

Each is listed with the torch versions for which it was checked: "run" means that the tests passed
with that version. Code elsewhere imports these names from here and never from torch's insides.

| what | checked |
|---|---|
| `torch._prims_common.elementwise_dtypes` | 2.13 run |
| `torch._functorch.aot_autograd.aot_module_simplified` | 2.13 run |
| `torch._functorch._aot_autograd.descriptors`: `PlainAOTInput`, ... | 2.13 run |
| `torch._dynamo.backends.common.aot_autograd` | 2.13 run |
| `torch._guards.TracingContext.fw_metadata.static_input_indices` | 2.13 run |
| `torch._dynamo.utils.same` | 2.13 run |
| `torch._C._to_dlpack`, `torch._C._from_dlpack` | 2.13 run |
| `torch.utils._python_dispatch._disable_current_modes` | 2.13 run |
| `torch._ops.OpOverload`, `torch._decomp.core_aten_decompositions` | 2.13 run |
| `torch._subclasses.FakeTensorMode`, `torch._dynamo.utils.counters` | 2.13 run |
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions
from torch._ops import OpOverload
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as _KIND
from torch._prims_common import elementwise_dtypes
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

to_dlpack: Callable[[Tensor], Any] = torch._C._to_dlpack
from_dlpack: Callable[[Any], Tensor] = torch._C._from_dlpack

ELEMENTWISE_PROMOTION = {
    "default": _KIND.DEFAULT,
    "int_to_float": _KIND.INT_TO_FLOAT,
    "to_bool": _KIND.ALWAYS_BOOL,
    "complex_to_float": _KIND.COMPLEX_TO_FLOAT,
}


def aot_autograd(**compilers: Any) -> Callable[..., Any]:
    """torch's own adapter from AOT Autograd to a Dynamo backend function."""
    from torch._dynamo.backends.common import aot_autograd as adapter

    return adapter(**compilers)


def static_input_indices() -> Collection[int]:
    """Inside an AOT Autograd callback: which of Dynamo's inputs are parameters and buffers."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    return frozenset(metadata.static_input_indices) if metadata is not None else frozenset()


def dynamo_input_index(placeholder: fx.Node) -> int | None:
    """Which of Dynamo's inputs a placeholder of an AOT graph is; None if it is none of them."""
    return getattr(placeholder.meta.get("desc"), "idx", None) if is_plain(placeholder) else None


def is_plain(placeholder: fx.Node) -> bool:
    """Whether a placeholder of an AOT graph is one of Dynamo's inputs."""
    return type(placeholder.meta.get("desc")).__name__ == "PlainAOTInput"


def is_tangent(placeholder: fx.Node) -> bool:
    """Whether a placeholder of an AOT backward graph is an incoming gradient."""
    return type(placeholder.meta.get("desc")).__name__ == "TangentAOTInput"


def mutated_input_indices(graph: fx.Graph) -> frozenset[int]:
    """Which of Dynamo's inputs an AOT graph updates."""
    found = set()
    for desc in graph.output_node().meta.get("desc") or ():
        if type(desc).__name__ == "InputMutationAOTOutput":
            index = getattr(desc.mutated_input, "idx", None)
            if index is not None:
                found.add(index)
    return frozenset(found)


def dynamo_counters() -> Any:
    """Dynamo's own counts of graphs, breaks and frames."""
    from torch._dynamo.utils import counters

    return counters


def same(reference: Any, result: Any, fp64_reference: Any, **settings: Any) -> bool:
    """The accuracy rule of PyTorch's own benchmark runners."""
    from torch._dynamo.utils import same as rule

    return rule(reference, result, fp64_reference, **settings)


__all__ = [
    "ELEMENTWISE_PROMOTION",
    "FakeTensorMode",
    "OpOverload",
    "aot_autograd",
    "core_aten_decompositions",
    "disable_current_modes",
    "dynamo_counters",
    "dynamo_input_index",
    "elementwise_dtypes",
    "from_dlpack",
    "is_plain",
    "is_tangent",
    "mutated_input_indices",
    "same",
    "static_input_indices",
    "to_dlpack",
]

"""What torch_tpu 0.2 has, computed on the CPU.

| torch_tpu | here |
|---|---|
| PrivateUse1 is renamed to "tpu" when torch is imported and there is a TPU | `load()` |
| `torch.tpu.is_initialized()`: whether it holds the TPU; true from its first use on | the same |
| the Dynamo backend "tpu", an object; `options` is the only keyword that it takes | `TpuBackend` |
| `dynamic=True` is refused; it asks for guards within Dynamo's tracing | the same |

Its source: `torch_tpu/_loader.py`, and `_backend.py` and `_device_module.py` below `_internal`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends import registry
from torch._dynamo.backends.common import aot_autograd

from tests.doubles import python_device


class TpuBackend:
    """The backend "tpu".

    Attributes:
        graphs: What it was given.
    """

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(
        self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Callable[..., Any]:
        kwargs.pop("options", None)
        if kwargs:
            raise TypeError(f"Unexpected keyword arguments: {kwargs}")
        if not torch._dynamo.config.assume_static_by_default:
            raise NotImplementedError(
                "TPU backend does not support torch.compile(..., dynamic=True, ...)."
            )
        assert torch._guards.TracingContext.try_get() is not None
        self.graphs.append(graph_module)
        run = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward))
        compiled: Callable[..., Any] = run(graph_module, example_inputs)
        return compiled


def load() -> tuple[type[python_device.PythonTensor], TpuBackend]:
    """As the import of torch where there is a TPU.

    Returns:
        The class of its tensors, and its backend.
    """
    made, backend = python_device.start("tpu"), TpuBackend()
    registry.register_backend(compiler_fn=backend, name="tpu")
    return made, backend

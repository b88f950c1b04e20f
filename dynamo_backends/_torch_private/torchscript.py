"""TorchScript's graphs, executors and fusers.

| what | checked |
|---|---|
| `torch._C.Graph` and TorchScript's types, `torch._C._create_function_from_graph` | 2.11+ |
| `torch._C.ScriptModule._register_attribute`, `_define`, `torch.jit._recursive` | 2.11+ |
| `torch._C._jit_to_static_module`, `_llvm_enabled`, `_jit_set_llga_enabled` | 2.11+ |
| `torch._C._jit_set_texpr_fuser_enabled`, `_jit_set_profiling_executor`, ... | 2.11+ |
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

jit: Any = torch._C  # TorchScript's intermediate representation: `Graph` and the types


def script_function(graph: Any) -> Callable[..., Any]:
    """Creates a function that executes a `torch._C.Graph`."""
    function: Callable[..., Any] = torch._C._create_function_from_graph("forward", graph)
    return function


def script_module(
    function: Any, tensors: Sequence[Tensor | None], numbers: Collection[int] = ()
) -> Any:
    """Creates a script module in eval mode that holds tensors and calls a function.

    Args:
        function: From `script_function`.
        tensors: One per parameter of the function: an attribute of the module, or None for what
            is a parameter of the module's `forward`.
        numbers: Positions of those parameters that are integers.
    """
    from torch.jit import _recursive

    module: Any = jit.ScriptModule("Block", torch._C.CompilationUnit(), True)
    names = [f"x{i}" for i in range(len(tensors))]
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is not None:
            module._register_attribute(name, torch._C.TensorType.get(), tensor)
    pairs = list(zip(names, tensors, strict=True))
    kinds = {f"x{i}": ": int" for i in numbers}
    given = [name + kinds.get(name, "") for name, tensor in pairs if tensor is None]
    parameters = ", ".join(["self", *given])
    arguments = ", ".join(name if tensor is None else f"self.{name}" for name, tensor in pairs)
    source = f"def forward({parameters}):\n    return function({arguments})\n"
    concrete = torch._C.ConcreteModuleType.from_jit_type(module._type())
    module._define(concrete, source, {"function": function}.get)
    return _recursive.wrap_cpp_module(module).eval()


def static_module(module: Any) -> Callable[..., Any]:
    """Wraps a frozen script module for Static Runtime; not thread-safe."""
    static: Callable[..., Any] = torch._C._jit_to_static_module(module._c)
    return static


@contextlib.contextmanager
def torchscript_fuser(nnc: bool, onednn: bool) -> Iterator[None]:
    """Turns on profiling and these fusers (context manager).

    `torch.jit.fuser` does that too, but prints a warning about nvFuser each time.
    """
    c = torch._C
    before = c._jit_can_fuse_on_cpu(), c._jit_can_fuse_on_gpu(), c._jit_texpr_fuser_enabled()
    onednn_before = c._jit_llga_enabled()
    executor, optimize = c._jit_set_profiling_executor(True), c._get_graph_executor_optimize(True)
    try:
        c._jit_override_can_fuse_on_cpu(True)
        c._jit_override_can_fuse_on_gpu(nnc)
        c._jit_set_texpr_fuser_enabled(nnc)
        c._jit_set_llga_enabled(onednn)
        yield
    finally:
        c._jit_set_llga_enabled(onednn_before)
        c._jit_set_texpr_fuser_enabled(before[2])
        c._jit_override_can_fuse_on_gpu(before[1])
        c._jit_override_can_fuse_on_cpu(before[0])
        c._get_graph_executor_optimize(optimize)
        c._jit_set_profiling_executor(executor)


def has_llvm() -> bool:
    """Returns whether NNC, built with LLVM, can generate code for this CPU."""
    return torch._C._llvm_enabled()


def has_onednn_graph() -> bool:
    """Returns whether this build of torch has the oneDNN Graph fuser."""
    before = torch._C._jit_llga_enabled()
    try:
        torch._C._jit_set_llga_enabled(True)
    except RuntimeError:
        return False
    torch._C._jit_set_llga_enabled(before)
    return True

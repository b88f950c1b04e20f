"""The backends on TorchScript: its interpreter, its passes for inference, and its compilers."""

import functools
from collections.abc import Callable, Collection
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import OpOverload, has_llvm
from dynamo_backends.graph.call_arguments import collect_call_tensors, dynamic_shape_reason
from dynamo_backends.graph.decomposition_tables import decomposition_table
from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.backend import RANGED, Availability, Backend
from dynamo_backends.interface.errors import CompileError, DeviceError
from dynamo_backends.interface.executable import Executable
from dynamo_backends.interface.plan import SUPPORTED, Support
from dynamo_backends.runtime.prepared_executables import with_prologue
from dynamo_backends.runtime.ranged_calls import make_for_range

# Of PyTorch's own wheels.
_REINSTALL = "pip install --force-reinstall torch"

# Static Runtime makes memory for their results as for their first input.
_KEEP_DTYPE = frozenset({"aten::div", "aten::sigmoid", "aten::tanh"})

# Passes that choose other strides for intermediate results would change what these mean.
_STRIDED = frozenset({"aten::as_strided", "aten::as_strided_scatter", "aten::as_strided_copy"})


class TorchScript(Backend):
    """Base class of the TorchScript backends.

    Attributes:
        devices: torch device types that it can compile for; () for all.
    """

    devices: ClassVar[tuple[str, ...]] = ()
    keeps_strides: ClassVar[bool] = False

    def availability(self) -> Availability:
        """See `Backend.availability`."""
        if not hasattr(torch._C, "_create_function_from_graph"):
            return Availability(False, f"torch {torch.__version__} has no TorchScript any more")
        return self.available()

    def available(self) -> Availability:
        """Returns whether what this backend needs of TorchScript is there."""
        return Availability(True, f"TorchScript of torch {torch.__version__}")

    def check_graph(self, graph: Graph, options: Any) -> None:
        """See `Backend.check_graph`."""
        for node in graph.placeholders:
            value = node.meta["val"]
            if isinstance(value, Tensor) and not self._runs_on(value.device.type, value):
                raise DeviceError(
                    f"{self.name} runs tensors on {' and '.join(self.devices)} here, and an input "
                    f"is on {value.device.type}; move the model and its inputs, or use another "
                    "backend."
                )

    def _runs_on(self, device: str, value: Tensor) -> bool:
        return not self.devices or device in self.devices or (device == "cpu" and not value.ndim)

    def preserved_operators(self, options: Any) -> Collection[OpOverload]:
        """See `Backend.preserved_operators`: torch's own operators are faster whole."""
        return whole_operators()

    def supports(self, node: fx.Node, options: Any) -> Support:
        """See `Backend.supports`."""
        from dynamo_backends.torchscript.lowering import why_not

        if isinstance(node.target, OpOverload):
            name = node.target._schema.name
            if name in _STRIDED and not self.keeps_strides:
                return Support(False, "it depends on the strides of its input")
            shape = dynamic_shape_reason(node)
            if shape is not None:
                return Support(False, shape)
        reason = why_not(node)
        return SUPPORTED if reason is None else Support(False, reason)


@functools.cache
def whole_operators() -> frozenset[OpOverload]:
    """Composite operators for which torch has kernels, except those that draw random numbers."""
    tag = torch.Tag.nondeterministic_seeded
    # Attention has the tag. Its kernel for CPUs refuses to drop anything, and where that for GPUs
    # does, no rule takes it apart.
    aten = torch.ops.aten
    attention = {
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
    return frozenset(op for op in decomposition_table(()) if tag not in op.tags) | attention


class TsTrace(TorchScript):
    """The graph as TorchScript, run by TorchScript's executor as it is set."""

    name = "ts_trace"
    summary = "TorchScript's executor, without freezing"
    dynamic_shapes = RANGED
    serves_ranges = True
    depends_on_ranges = False
    keeps_strides = True

    def compile(self, graph: Graph, options: Any) -> Executable:
        """See `Backend.compile`."""
        from dynamo_backends.torchscript.runtime import ScriptExecutable

        def make(ranged: bool) -> Executable:
            return with_prologue(graph, lambda rest: ScriptExecutable(rest, ranged=ranged))

        return make_for_range(graph, make)


class Ofi(TorchScript):
    """Frozen TorchScript after `torch.jit.optimize_for_inference`."""

    name = "ofi"
    summary = "TorchScript, frozen and optimized for inference"
    dynamic_shapes = RANGED
    serves_ranges = True
    depends_on_ranges = False

    def compile(self, graph: Graph, options: Any) -> Executable:
        """See `Backend.compile`."""
        from dynamo_backends.torchscript.runtime import OptimizedExecutable

        return make_for_range(graph, lambda ranged: OptimizedExecutable(graph, ranged=ranged))


class StaticRuntime(TorchScript):
    """Frozen TorchScript run by Static Runtime."""

    name = "static_runtime"
    summary = "TorchScript's Static Runtime, with preplanned memory and without a fuser"
    dynamic_shapes = RANGED
    serves_ranges = True
    depends_on_ranges = False
    trains = False
    devices = ("cpu",)

    def available(self) -> Availability:
        """See `TorchScript.available`."""
        if not hasattr(torch._C, "_jit_to_static_module"):
            reason = f"torch {torch.__version__} was built without Static Runtime"
            return Availability(False, reason, _REINSTALL)
        return Availability(True, "Static Runtime, part of torch", devices=self.devices)

    def supports(self, node: fx.Node, options: Any) -> Support:
        """See `Backend.supports`."""
        if isinstance(node.target, OpOverload) and node.target._schema.name in _KEEP_DTYPE:
            first = node.all_input_nodes[0].meta["val"]
            if not (first.is_floating_point() or first.is_complex()):
                return Support(False, "Static Runtime would return the dtype of the input")
        return super().supports(node, options)

    def compile(self, graph: Graph, options: Any) -> Executable:
        """See `Backend.compile`."""
        from dynamo_backends.torchscript.runtime import StaticExecutable

        if graph.kind != "inference":
            raise CompileError("Static Runtime's results cannot be differentiated")
        return make_for_range(graph, lambda ranged: StaticExecutable(graph, ranged=ranged))


class NNC(TorchScript):
    """TorchScript with its tensor expression compiler, NNC."""

    name = "nnc"
    summary = "TorchScript's compiler NNC (tensor expressions)"

    @property
    def devices(self) -> tuple[str, ...]:  # type: ignore[override]
        """The devices for which NNC can generate code here."""
        found: list[tuple[str, Callable[[], bool]]] = [
            ("cpu", has_llvm),
            ("cuda", torch.cuda.is_available),
        ]
        return tuple(device for device, usable in found if usable())

    def available(self) -> Availability:
        """See `TorchScript.available`."""
        if not self.devices:
            return Availability(
                False,
                f"NNC generates code for CPUs with LLVM, and torch {torch.__version__} was built "
                "without LLVM; for CUDA devices it needs none, and torch sees no CUDA device",
                "build torch from source with USE_LLVM=<path of LLVM>",
            )
        return Availability(True, "NNC, part of torch", devices=self.devices)

    def compile(self, graph: Graph, options: Any) -> Executable:
        """See `Backend.compile`."""
        from dynamo_backends.torchscript.runtime import ScriptExecutable

        return with_prologue(graph, lambda rest: ScriptExecutable(rest, "nnc"))


class OneDNNGraph(TorchScript):
    """Frozen TorchScript with the fuser for oneDNN Graph."""

    name = "onednn_graph"
    summary = "TorchScript with fusion by oneDNN Graph"
    devices = ("cpu",)

    def available(self) -> Availability:
        """See `TorchScript.available`."""
        from dynamo_backends.torchscript.runtime import onednn_graph_is_there

        if not onednn_graph_is_there():
            reason = f"torch {torch.__version__} was built without the fuser for oneDNN Graph"
            return Availability(False, reason, _REINSTALL)
        return Availability(True, "oneDNN Graph, part of torch", devices=self.devices)

    def supports(self, node: fx.Node, options: Any) -> Support:
        """See `Backend.supports`. The fuser fails at run time on other tensors than these."""
        if not all(
            tensor.is_floating_point() and tensor.ndim for tensor in collect_call_tensors(node)
        ):
            return Support(
                False, "oneDNN Graph supports floating-point tensors with at least one dimension"
            )
        return super().supports(node, options)

    def compile(self, graph: Graph, options: Any) -> Executable:
        """See `Backend.compile`."""
        from dynamo_backends.torchscript.runtime import FrozenExecutable

        return FrozenExecutable(graph, "onednn")

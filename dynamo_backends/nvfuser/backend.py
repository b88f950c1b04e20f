"""The backend `nvfuser`: NVIDIA's fusion compiler, for blocks of a graph on CUDA devices."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.cudagraphs.options import CudaGraphOptions
from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.backend import Availability, Backend
from dynamo_backends.interface.errors import BackendUnavailableError
from dynamo_backends.interface.options import Limits
from dynamo_backends.interface.plan import SUPPORTED, Support
from dynamo_backends.nvfuser import vendor
from dynamo_backends.runtime.prepared_executables import UnfrozenExecutable


@dataclass(frozen=True)
class NvFuserOptions(CudaGraphOptions):
    """The options of `nvfuser`, besides those of backends that can be run as CUDA graphs.

    Attributes:
        min_block_size: As for every backend, with a larger default, because launching a fusion
            costs about as much as several operators in eager.
        matmul: Whether fusions may contain matrix products. nvFuser runs them with ATen's kernels,
            so this avoids splits and launches, but does not make products faster. False: matrix
            products run in eager.
        symbolic_sizes: Define fusions with symbolic sizes, so that graphs that differ only in sizes
            share one fusion. False: each graph has its own fusion with static sizes.
        max_fusions: Number of fusions that are cached in this process.
    """

    min_block_size: int = 4
    matmul: bool = True
    symbolic_sizes: bool = True
    max_fusions: int = 1024

    LIMITS: ClassVar[Limits] = {"max_fusions": (1, None)}


class NvFuser(Backend):
    """See the module's docstring."""

    name = "nvfuser"
    summary = "nvFuser, NVIDIA's fusion compiler for CUDA"
    Options = NvFuserOptions
    trains = True
    dynamic_shapes = "one fusion for many shapes"
    optional_packages = ("nvfuser-*",)  # one for each CUDA and torch

    def availability(self) -> Availability:
        """See `Backend.availability`."""
        if not vendor.is_installed():
            reason = "nvFuser is not installed"
            if not vendor.is_present():
                reason += ", and torch finds no CUDA device"
            return Availability(False, reason, vendor.remedy())
        if not vendor.is_present():
            return Availability(
                False, f"{vendor.MODULE} is installed, but torch finds no CUDA device"
            )
        found = " ".join((vendor.MODULE, *self.versions().values()))
        return Availability(True, found, devices=(vendor.TYPE,))

    def check_graph(self, graph: Graph, options: NvFuserOptions) -> None:
        """See `Backend.check_graph`."""
        vendor.require_device(graph, self.name)
        vendor.load()

    def preserved_operators(self, options: NvFuserOptions) -> Collection[OpOverload]:
        """See `Backend.preserved_operators`: whatever has a lowering is handed over whole."""
        from dynamo_backends._torch_private import core_decompositions
        from dynamo_backends.nvfuser.lowering.registry import TABLE

        return [op for op in core_decompositions() if str(op) in TABLE]

    def supports(self, node: fx.Node, options: NvFuserOptions) -> Support:
        """See `Backend.supports`."""
        from dynamo_backends.nvfuser.compiler import why_not
        from dynamo_backends.nvfuser.lowering.reduction import PRODUCTS

        if not options.matmul and str(node.target) in PRODUCTS:
            return Support(False, "the option matmul=False leaves matrix products to eager")
        try:
            nvfuser = vendor.load()
        except BackendUnavailableError:
            nvfuser = None  # `prepare` says so when it comes to running
        reason = why_not(node, nvfuser)
        return SUPPORTED if reason is None else Support(False, reason)

    def compile(self, graph: Graph, options: NvFuserOptions) -> Any:
        """See `Backend.compile`."""
        from dynamo_backends.nvfuser.compiler import lower_graph
        from dynamo_backends.nvfuser.program import FUSIONS
        from dynamo_backends.nvfuser.runtime import Launch

        nvfuser = vendor.load()
        lowered = lower_graph(graph, options.symbolic_sizes)
        fusion = FUSIONS.get(lowered.program, nvfuser, options.max_fusions)
        return UnfrozenExecutable(graph, Launch(graph, lowered, fusion))

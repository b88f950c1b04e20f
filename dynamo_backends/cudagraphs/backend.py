"""Backends that are CUDA graphs, and which ATen calls can be part of one."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.cudagraphs.device import driver
from dynamo_backends.cudagraphs.options import CudaGraphOptions
from dynamo_backends.graph.call_arguments import collect_tensors, dynamic_shape_reason
from dynamo_backends.graph.constant_evaluation import evaluate_constant
from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface import protocols
from dynamo_backends.interface.backend import Availability, Backend
from dynamo_backends.interface.executable import Executable
from dynamo_backends.interface.plan import SUPPORTED, Plan, Support
from dynamo_backends.interface.registry import get_backend
from dynamo_backends.runtime.prepared_executables import UnfrozenExecutable
from dynamo_backends.torchscript.backend import whole_operators

INSTALL = "pip install torch --index-url https://download.pytorch.org/whl/cu130"


@dataclass(frozen=True)
class EagerGraphOptions(CudaGraphOptions):
    """`CudaGraphOptions`, with graphs by default."""

    cudagraphs: bool = True

    @property
    def keeps_scalars_on_device(self) -> bool:
        """See `Options.keeps_scalars_on_device`: what is on the host stays in eager in any case."""
        return True


class CudaGraphsEager(Backend):
    """torch's own kernels, launched together as a CUDA graph."""

    name = "cudagraphs_eager"
    summary = "torch's own kernels, launched together as CUDA graphs"
    Options = EagerGraphOptions

    def availability(self) -> Availability:
        """See `Backend.availability`."""
        reason = driver().why_not()
        if reason is not None:
            return Availability(False, reason, INSTALL)
        return Availability(True, f"CUDA {torch.version.cuda}", devices=(driver().kind,))

    def preserved_operators(self, options: EagerGraphOptions) -> Collection[OpOverload]:
        """See `Backend.preserved_operators`: torch's own kernels are those of whole operators."""
        return whole_operators()

    def supports(self, node: fx.Node, options: EagerGraphOptions) -> Support:
        """See `Backend.supports`."""
        reason = why_not(node)
        return SUPPORTED if reason is None else Support(False, reason)

    def compile(self, graph: Graph, options: EagerGraphOptions) -> Executable:
        """See `Backend.compile`."""
        return UnfrozenExecutable(graph, graph.module)


class WithCudaGraphs(Backend):
    """Another backend whose programs are launched as CUDA graphs.

    Attributes:
        inner: That backend.
    """

    inner: ClassVar[Backend]

    def availability(self) -> Availability:
        """See `Backend.availability`."""
        found = self.inner.availability()
        reason = driver().why_not()
        if not found.usable or reason is None:
            return dataclasses.replace(found, devices=(driver().kind,) if found.usable else ())
        return Availability(False, reason, INSTALL)

    def check_graph(self, graph: Graph, options: Any) -> None:
        """See `Backend.check_graph`."""
        self.inner.check_graph(graph, options)

    def preserved_operators(self, options: Any) -> Collection[OpOverload]:
        """See `Backend.preserved_operators`."""
        return self.inner.preserved_operators(options)

    def decomposed_operators(self, options: Any) -> Collection[OpOverload]:
        """See `Backend.decomposed_operators`."""
        return self.inner.decomposed_operators(options)

    def plan(self, graph: Graph, options: Any) -> Plan:
        """See `Backend.plan`."""
        return self.inner.plan(graph, options)

    def compile(self, graph: Graph, options: Any) -> Executable:
        """See `Backend.compile`."""
        return self.inner.compile(graph, options)

    def cache_key(self, options: Any) -> str | None:
        """See `SavesExecutables.cache_key`."""
        return protocols.cache_key(self.inner, options)

    def load(self, parts: Mapping[str, bytes], graph: Graph, options: Any) -> Executable:
        """See `SavesExecutables.load`."""
        return protocols.load_executable(self.inner, parts, graph, options)


WRAPPED: Mapping[str, str] = {"nvfuser_cudagraphs": "nvfuser"}
"""Backends made of others: name to the backend that compiles. One needs its row in the registry."""


def wrap_backend(name: str, inner: str) -> Backend:
    """Wraps a backend so that its programs are launched as CUDA graphs.

    Args:
        name: Its own.
        inner: Of the backend that compiles; its executables launch their work on torch's current
            stream and do not wait for it.

    Raises:
        UnknownBackendError: There is no such backend.
    """
    compiles = get_backend(inner)
    bases = (compiles.Options,)
    if not issubclass(compiles.Options, CudaGraphOptions):
        bases = (CudaGraphOptions, compiles.Options)  # type: ignore[assignment]
    fields = [("cudagraphs", bool, True)]
    options = dataclasses.make_dataclass("WrappedOptions", fields, bases=bases, frozen=True)
    options.__module__ = __name__
    members = {
        "name": name,
        "summary": f"{compiles.name}, launched as CUDA graphs",
        "Options": options,
        "trains": compiles.trains,
        "packages": compiles.packages,
        "optional_packages": compiles.optional_packages,
        "install": compiles.install,
        "inner": compiles,
    }
    backend: Backend = type("WithCudaGraphs", (WithCudaGraphs,), members)()
    return backend


def nvfuser_cudagraphs() -> Backend:
    """nvFuser's programs as CUDA graphs."""
    return wrap_backend("nvfuser_cudagraphs", WRAPPED["nvfuser_cudagraphs"])


_TAGS = {
    "cudagraph_unsafe": "torch marks it as unsafe in CUDA graphs",
    "data_dependent_output": "its result is a Python scalar, so the host waits for the device",
}

_WAITS: dict[str, str] = {
    "_assert_scalar": "it checks a scalar on the host",
    "_linalg_check_errors": "the host reads its result",
    "_linalg_eigvals": "it is computed on the host",
    "_local_scalar_dense": "its result is a Python scalar, so the host waits for the device",
    "bincount": "the host reads the largest element of its input",
    "histc": "the host reads the minimum and maximum of its input",
    "is_nonzero": "its result is a Python bool, so the host waits for the device",
    "linalg_eig": "it is computed on the host",
    "linalg_lstsq": "its kernel synchronizes with the device",
    "multinomial": "the host checks the probabilities",
    "repeat_interleave": "the host reads the sum of the repeats",
    "segment_reduce": "the host checks the lengths",
}
"""Operators of ATen whose kernels for CUDA wait for the device, and what for."""

_INDEXED = frozenset(
    {"index.Tensor", "_unsafe_index.Tensor", "index_put.default", "_unsafe_index_put.default"}
)
_MASKS = (torch.bool, torch.uint8)


def why_not(node: fx.Node) -> str | None:
    """Returns why a call cannot be recorded; None if it can."""
    if not isinstance(node.target, OpOverload):
        return "it is not an ATen operator"
    for rule in _RULES:
        reason = rule(node)
        if reason is not None:
            return reason
    return None


def _tagged(node: fx.Node) -> str | None:
    target: Any = node.target
    tags = {tag.name for tag in target.tags}
    return next((reason for name, reason in _TAGS.items() if name in tags), None)


def _waiting(node: fx.Node) -> str | None:
    target: Any = node.target
    namespace, _, name = target._schema.name.partition("::")
    if namespace != "aten":
        return None
    if name == "repeat_interleave" and node.kwargs.get("output_size") is not None:
        return None
    return _WAITS.get(name)


def _masked(node: fx.Node) -> str | None:
    """Indexing by a mask looks for the elements that are set, and the host waits for how many."""
    if str(node.target).removeprefix("aten.") not in _INDEXED:
        return None
    indices: Any = node.args[1] if len(node.args) > 1 else node.kwargs["indices"]
    for index in indices:
        if isinstance(index, fx.Node) and index.meta["val"].dtype in _MASKS:
            return "the host waits for the number of elements that its mask selects"
    return None


def _elsewhere(node: fx.Node) -> str | None:
    """Tensors on other devices: a graph would keep the values that they have while it is recorded.

    Numbers that depend on no input are the exception: they may be baked in by a kernel that takes
    numbers from the host as they are.
    """
    for n in (node, *node.all_input_nodes):
        for tensor in collect_tensors(n.meta.get("val")):
            if tensor.layout is not torch.strided:
                return f"one of its tensors has the layout {tensor.layout}"
            if tensor.device.type != driver().kind and not _is_fixed_number(n, node):
                return f"one of its tensors is on {tensor.device.type}"
    return None


def _is_fixed_number(value: fx.Node, call: fx.Node) -> bool:
    """Returns whether a value is known at compile time and may come from the host."""
    if value.meta["val"].ndim or evaluate_constant(value) is None:
        return False
    tags = getattr(call.target, "tags", ())
    return value is call or evaluate_constant(call) is not None or torch.Tag.pointwise in tags


_RULES: tuple[Callable[[fx.Node], str | None], ...] = (
    _tagged, _waiting, _masked, dynamic_shape_reason, _elsewhere,
)  # fmt: skip

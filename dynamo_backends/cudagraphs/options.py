"""The options of backends that can be run as CUDA graphs."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from dynamo_backends.cudagraphs.captured import GraphedFunction
from dynamo_backends.cudagraphs.device import driver
from dynamo_backends.graph.call_arguments import collect_tensors
from dynamo_backends.graph.graph import WEIGHT_ROLES, Graph, Role, find_device_index
from dynamo_backends.interface.errors import CompileError, DeviceError
from dynamo_backends.interface.executable import Bound, Executable
from dynamo_backends.interface.options import Limits, Options
from dynamo_backends.interface.report import GraphReport

log = logging.getLogger("dynamo_backends")

_STAY = WEIGHT_ROLES | {Role.MUTATED, Role.OPTIMIZER_STATE}


def require_device(graph: Graph, backend: str) -> None:
    """Checks that a captured graph, for which CUDA graphs were asked for, is on a CUDA device.

    Raises:
        DeviceError: It is not.
    """
    if _device_index(graph) is not None:
        return
    kind = driver().kind
    found = sorted(
        {t.device.type for n in graph.placeholders for t in collect_tensors(n.meta.get("val"))}
    )
    where = f"its inputs are on {', '.join(found)}" if found else "it has no inputs"
    raise DeviceError(
        f"{backend} uses CUDA graphs (cudagraphs=True), but the graph has no tensors on a {kind} "
        f"device ({where}). Move the model and its inputs to a {kind} device"
        + ("." if backend.startswith("cudagraphs") else ", or remove options={'cudagraphs': True}.")
    )


class CapturedExecutable(Executable):
    """An executable whose bound functions are recorded.

    Each binding of weights is recorded apart: its prepared weights are part of the graph.

    Args:
        inner: The executable itself.
        graph: What it was compiled from.
        options: Options of its backend.
        backend: The backend's name.
    """

    def __init__(self, inner: Executable, graph: Graph, options: "CudaGraphOptions", backend: str):
        self.inner = inner
        self._options = options
        self._index = _device_index(graph)
        roles = [graph.inputs[i].role for i in graph.activations]
        self._baked = [k for k, role in enumerate(roles) if role in _STAY]
        self._hopeful = [k for k, role in enumerate(roles) if role is Role.SAVED]
        # What a forward graph returns is saved, and a gradient is kept: both outlive the next call.
        self._reuse = options.cudagraph_outputs == "reused" and graph.kind == "inference"
        self._notes = ReportCallbacks(backend, options)

    def bind(self, weights: Sequence[Tensor]) -> tuple[Bound, Collection[int]]:
        """See `Executable.bind`."""
        return self._captured(*self.inner.bind(weights))

    def bind_live(self, weights: Sequence[Tensor]) -> tuple[Bound, Collection[int]] | None:
        """See `Executable.bind_live`."""
        live = self.inner.bind_live(weights)
        return None if live is None else self._captured(*live)

    def _captured(self, bound: Bound, copied: Collection[int]) -> tuple[Bound, Collection[int]]:
        if self._index is None:
            self._notes.refused("none of its tensors is on a CUDA device")
            return bound, copied
        function = GraphedFunction(
            bound,
            self._index,
            self._options.cudagraph_warmup,
            self._notes,
            baked=self._baked,
            hopeful=self._hopeful,
            reuse=self._reuse,
        )
        return function, copied  # type: ignore[return-value]

    def set_report(self, report: GraphReport) -> None:
        """See `Executable.set_report`."""
        self._notes.report = report
        self.inner.set_report(report)

    def dump(self) -> dict[str, bytes] | None:
        """See `Executable.dump`."""
        return self.inner.dump()


class ReportCallbacks:
    """Notes in a graph's report which blocks became CUDA graphs, and why others not.

    Args:
        backend: The backend's name.
        options: Its options: with `fallback="error"` a refusal is an error.

    Attributes:
        report: The report, as soon as it is known.
    """

    def __init__(self, backend: str, options: Options):
        self._backend = backend
        self._strict = options.fallback == "error"
        self.report: GraphReport | None = None

    def captured(self) -> None:
        """See `captured.Notes`."""
        if self.report is not None:
            self.report.cuda_graphs += 1

    def refused(self, reason: str) -> None:
        """See `captured.Notes`.

        Raises:
            CompileError: With `fallback="error"`.
        """
        if self._strict:
            raise CompileError(f"a block cannot be recorded as a CUDA graph: {reason}")
        if self.report is not None:
            self.report.uncaptured.append(reason)
        log.warning("%s: a block runs without a CUDA graph: %s", self._backend, reason)


def _device_index(graph: Graph) -> int | None:
    """Index of the CUDA device that a graph computes on; None if on none."""
    return find_device_index((*graph.placeholders, *graph.calls), driver().kind)


@dataclass(frozen=True)
class CudaGraphOptions(Options):
    """Declares that a backend's executables can be captured: a backend's options extend this class.

    That is all a backend has to do. It promises that its executables launch their work on torch's
    current stream, take their memory from torch, and do not wait for the device.

    Attributes:
        cudagraphs: Record the kernels of a compiled block as a CUDA graph, once for each set of
            shapes, and replay it from then on.
        cudagraph_outputs: "fresh" returns new tensors at every call; "reused" returns the static
            output tensors of the CUDA graph, which the next call of the same graph overwrites.
        cudagraph_warmup: Number of calls before the recorded one, at least 1, because libraries
            initialize themselves in their first call, which cannot be recorded.
    """

    cudagraphs: bool = False
    cudagraph_outputs: Literal["fresh", "reused"] = "fresh"
    cudagraph_warmup: int = 2

    LIMITS: ClassVar[Limits] = {"cudagraph_warmup": (1, None)}

    @property
    def keeps_scalars_on_device(self) -> bool:
        """See `Options.keeps_scalars_on_device`: those on the host would be part of the graph."""
        return self.cudagraphs

    def validate_graph(self, graph: Graph, backend: str) -> None:
        """See `Options.validate_graph`: CUDA graphs need tensors on a CUDA device."""
        if self.cudagraphs:
            require_device(graph, backend)

    def wrap_executable(self, executable: Executable, graph: Graph, backend: str) -> Executable:
        """See `Options.wrap_executable`: it is recorded as a CUDA graph if that is asked for."""
        if not self.cudagraphs:
            return executable
        return CapturedExecutable(executable, graph, self, backend)
